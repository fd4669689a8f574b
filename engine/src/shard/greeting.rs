//! What a lane does before it is of use where the servers demand a secret: both sides prove that they know it.
//!
//! ```text
//!  connected ──► Challenge (our nonce) ──► its nonce ──► Authenticate (our proof) ──► its proof, checked ──► up
//! ```
//!
//! Nothing is asked for before, and nothing that a peer without the secret sends is believed: the lane ends with an error
//! that says so, and the peer is left alone for a while as one that cannot be reached.

use super::lane::{Ask, Entries, LaneState, What};
use super::reactor::Reactor;
use crate::Error;
use crate::auth::{ClientHandshake, Secret};
use crate::wire;
use std::time::Instant;

impl Reactor {
    /// A connection was made: asks for the peer's nonce, if there is a secret.
    pub(super) fn greet(&mut self, id: u64, secret: &Secret) {
        let request_id = self.next_request_id();
        let Some(lane) = self.lanes.get_mut(&id) else { return };
        let handshake = match ClientHandshake::begin(secret) {
            Ok(handshake) => handshake,
            Err(error) => return self.break_lane(id, format!("cannot authenticate: {error}")),
        };
        lane.state = LaneState::Greeting;
        lane.owed_since = None;
        let nonce = *handshake.nonce();
        let ask = Ask { id: request_id, what: What::Challenge(handshake) };
        lane.ask(ask, Instant::now(), |out| wire::encode_challenge(out, request_id, &nonce));
        lane.send_next(&mut *self.transport);
        self.receive_next(id);
    }

    /// The body of an answer is there that is no part of a value.
    pub(super) fn told(&mut self, id: u64, entries: Entries) -> Result<(), String> {
        let Some(lane) = self.lanes.get_mut(&id) else { return Ok(()) };
        if !matches!(lane.asked(entries.id), Some(What::Challenge(_) | What::Authenticate(_))) {
            return self.located(id, entries);
        }
        let Ok(token) = <&[u8; wire::TOKEN_BYTES]>::try_from(entries.bytes.as_slice()) else {
            return Err(format!("{} bytes for a nonce or proof", entries.bytes.len()));
        };
        let proved = match lane.settle(entries.id) {
            Some(What::Challenge(handshake)) => {
                let (proof, check) = handshake.prove(token);
                let request_id = self.next_request_id();
                let Some(lane) = self.lanes.get_mut(&id) else { return Ok(()) };
                let ask = Ask { id: request_id, what: What::Authenticate(check) };
                lane.ask(ask, Instant::now(), |out| wire::encode_authenticate(out, request_id, &proof));
                lane.send_next(&mut *self.transport);
                return Ok(());
            }
            Some(What::Authenticate(check)) => check.holds(token),
            _ => false,
        };
        let peer = lane.peer;
        if proved {
            lane.up();
            self.counters().lanes_opened.add(1);
            self.dispatch(peer);
        } else {
            let peer = self.peers[peer].address.clone();
            let reason = "it does not know the secret: nothing that it sends is believed".into();
            self.end_lane(id, Error::Refused { peer, reason });
        }
        Ok(())
    }
}
