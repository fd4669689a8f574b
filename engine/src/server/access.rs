//! What a connection may ask for before it has proved that it knows the server's secret, and the proof itself.

use super::accept::Shared;
use super::connection::{Answer, Connection};
use super::requests::refuse;
use crate::auth::ServerHandshake;
use crate::wire::{Limits, Op, RequestError, RequestEvent, Status};

/// Longest body that is read of an unauthenticated connection: a Get with the longest key has less.
const LOCKED_BODY_BYTES_MAX: usize = 8 << 10;

const NOT_YET: &str = "this server demands a secret: authenticate first (secret_file, --secret-file)";

/// What is to become of the connection after a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Next {
    GoOn,
    /// It has just proved that it knows the secret.
    Unlocked,
    /// It is to end, after the answers that are queued.
    End,
}

/// One connection's right to be served.
pub(super) struct Access {
    /// `None`: the server has no secret.
    handshake: Option<ServerHandshake>,
    locked: bool,
}

impl Access {
    pub(super) fn new(shared: &Shared) -> Self {
        let handshake = shared.config.secret.clone().map(ServerHandshake::new);
        Access { locked: handshake.is_some(), handshake }
    }

    /// What a connection's requests may be like: small ones until it is unlocked.
    pub(super) fn limits(&self, limits: Limits) -> Limits {
        match self.locked {
            true => Limits {
                small_body_bytes_max: limits.small_body_bytes_max.min(LOCKED_BODY_BYTES_MAX),
                ..limits
            },
            false => limits,
        }
    }

    /// The status and reason with which a malformed request is answered.
    pub(super) fn judge(&self, error: &RequestError) -> (Status, String) {
        match error.op {
            // Its length may be within the limits of those who have authenticated.
            Some(Op::Lookup | Op::Put) if self.locked => (Status::Unauthenticated, NOT_YET.to_owned()),
            _ => (error.error.status(), error.to_string()),
        }
    }

    /// Serves an event that is about access, and refuses the others while locked. `None`: it is to be served.
    pub(super) fn serve(
        &mut self,
        shared: &Shared,
        connection: &Connection,
        event: &RequestEvent<'_>,
    ) -> Option<Next> {
        let refused = |op, request_id, reason: &str| {
            connection.answer(refuse(shared, op, request_id, (Status::Unauthenticated, reason.to_owned())));
        };
        let (op, request_id) = match *event {
            RequestEvent::Challenge { request_id, nonce } => {
                let Some(handshake) = &mut self.handshake else {
                    refused(Op::Challenge, request_id, "this server has no secret and can prove none");
                    return Some(Next::GoOn);
                };
                connection.answer(match handshake.challenge(&nonce) {
                    Ok(nonce) => Answer::token(Op::Challenge, request_id, &nonce),
                    Err(error) => {
                        refuse(shared, Op::Challenge, request_id, (Status::Internal, error.to_string()))
                    }
                });
                return Some(Next::GoOn);
            }
            RequestEvent::Authenticate { request_id, proof } => {
                let Some(answer) = self.handshake.as_mut().and_then(|it| it.authenticate(&proof)) else {
                    tracing::warn!(peer = %connection.peer, "a client did not prove that it knows the secret");
                    shared.count(|stats| stats.authentications_failed += 1);
                    refused(Op::Authenticate, request_id, "the proof does not hold: is it the same secret?");
                    return Some(Next::End);
                };
                self.locked = false;
                connection.authenticated();
                connection.answer(Answer::token(Op::Authenticate, request_id, &answer));
                return Some(Next::Unlocked);
            }
            _ if !self.locked => return None,
            RequestEvent::Ping { .. } => return None,
            RequestEvent::PutStart { request_id, .. } => {
                refused(Op::Put, request_id, NOT_YET);
                return Some(Next::End);
            }
            RequestEvent::Get { request_id, .. } => (Op::Get, request_id),
            RequestEvent::Lookup { request_id, .. } => (Op::Lookup, request_id),
            RequestEvent::Remove { request_id, .. } => (Op::Remove, request_id),
            RequestEvent::Stats { request_id } => (Op::Stats, request_id),
            // Only after a Put's start, which ends the connection.
            RequestEvent::PutBytes(_) | RequestEvent::PutEnd { .. } => return Some(Next::End),
        };
        refused(op, request_id, NOT_YET);
        Some(Next::GoOn)
    }
}
