//! Authentication by a shared secret: each side proves that it knows the secret without sending it.
//!
//! The pure part: nonces, proofs and their checks. It knows neither sockets nor frames; the slice server, its
//! client and the lanes of a cache carry the 32-byte tokens in the operations Challenge and Authenticate of
//! [`wire`](crate::wire).
//!
//! ```text
//!  client                                             server
//!    client nonce ── Challenge ──────────────────────►
//!                 ◄───────────────────────────── Ok ── server nonce, good for one attempt
//!    client proof ── Authenticate ───────────────────► checked
//!    checked      ◄───────────────────────────── Ok ── server proof
//!
//!  client proof = HMAC-SHA-256(secret, CLIENT_LABEL ‖ server nonce ‖ client nonce)
//!  server proof = HMAC-SHA-256(secret, SERVER_LABEL ‖ client nonce ‖ server nonce)
//! ```
//!
//! Both nonces are drawn afresh for each attempt, so that a recorded proof is good for nothing; the labels keep
//! one side's proof from being sent back as the other's.
//!
//! What it does not give: it hides nothing and protects nothing that follows on the connection. Who can read
//! the network reads the values, and who can change it may relay a handshake and then speak in its place. Who
//! has recorded a handshake (or was connected to in the server's place) can try secrets without asking anybody:
//! use a random secret, such as 32 bytes of `/dev/urandom`, never a word.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use zeroize::Zeroizing;

use crate::{Error, Result, random};

/// Drawn by each side for each attempt.
pub type Nonce = [u8; 32];
/// What knowing the secret is proved with.
pub type Proof = [u8; 32];

/// Shortest secret in bytes.
pub const SECRET_BYTES_MIN: usize = 16;
/// Longest secret in bytes.
pub const SECRET_BYTES_MAX: usize = 4096;

const CLIENT_LABEL: &[u8] = b"hotslice 1 client proof";
const SERVER_LABEL: &[u8] = b"hotslice 1 server proof";

/// A shared secret. Never printed; wiped when the last clone goes.
#[derive(Clone)]
pub struct Secret(Arc<Zeroizing<Vec<u8>>>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// A secret of these bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for fewer than [`SECRET_BYTES_MIN`] and more than [`SECRET_BYTES_MAX`] bytes.
    pub fn new(bytes: Zeroizing<Vec<u8>>) -> Result<Self> {
        if !(SECRET_BYTES_MIN..=SECRET_BYTES_MAX).contains(&bytes.len()) {
            let value = format!("a secret of {} bytes", bytes.len());
            let allowed = format!("{SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes are allowed");
            return Err(Error::Config { setting: "secret_file", value, allowed });
        }
        Ok(Self(Arc::new(bytes)))
    }

    /// Reads a secret from a file. One newline at its end does not belong to it.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it cannot be read, is no file, is open to others than its owner and group, or
    /// holds no secret of an allowed length.
    pub fn read(path: &Path) -> Result<Self> {
        let refused = |allowed: String| Error::Config {
            setting: "secret_file",
            value: path.display().to_string(),
            allowed,
        };
        let unreadable =
            |error: std::io::Error| refused(format!("a file that can be read is needed ({error})"));
        // Does not wait, should it be a pipe.
        let file =
            OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(unreadable)?;
        let about = file.metadata().map_err(unreadable)?;
        if !about.is_file() {
            return Err(refused("a regular file is needed".to_owned()));
        }
        if about.mode() & 0o007 != 0 {
            let mode = about.mode() & 0o777;
            return Err(refused(format!(
                "its mode is {mode:04o}: others than its owner and group must have no access (chmod o= {})",
                path.display()
            )));
        }
        // Room for all of it from the start: growing would leave copies behind.
        let mut bytes = Zeroizing::new(Vec::with_capacity(SECRET_BYTES_MAX + 2));
        file.take(SECRET_BYTES_MAX as u64 + 2).read_to_end(&mut bytes).map_err(unreadable)?;
        if bytes.last() == Some(&b'\n') {
            bytes.pop();
        }
        let len = bytes.len();
        Self::new(bytes).map_err(|_| {
            let more = if len > SECRET_BYTES_MAX { " or more" } else { "" };
            refused(format!(
                "it holds a secret of {len}{more} bytes: {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} are allowed"
            ))
        })
    }

    fn mac(&self, label: &[u8], first: &Nonce, second: &Nonce) -> Hmac<Sha256> {
        mac(&self.0, &[label, first, second])
    }
}

fn mac(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key) else {
        unreachable!("HMAC takes keys of every length")
    };
    parts.iter().for_each(|part| mac.update(part));
    mac
}

/// The client's side of one attempt, before the server's nonce has come.
#[derive(Debug)]
pub struct ClientHandshake {
    secret: Secret,
    nonce: Nonce,
}

impl ClientHandshake {
    /// Draws a nonce.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the kernel gives no random bytes.
    pub fn begin(secret: &Secret) -> Result<Self> {
        Ok(Self { secret: secret.clone(), nonce: random::bytes()? })
    }

    /// The body of Challenge.
    pub fn nonce(&self) -> &Nonce {
        &self.nonce
    }

    /// Takes the server's nonce (the answer to Challenge). Returns the body of Authenticate, and what the answer
    /// to that is to be checked with.
    pub fn prove(self, server_nonce: &Nonce) -> (Proof, ServerCheck) {
        let proof = self.secret.mac(CLIENT_LABEL, server_nonce, &self.nonce).finalize().into_bytes().into();
        (proof, ServerCheck { secret: self.secret, client_nonce: self.nonce, server_nonce: *server_nonce })
    }
}

/// The client's side of one attempt, when only the server's proof is missing.
#[derive(Debug)]
pub struct ServerCheck {
    secret: Secret,
    client_nonce: Nonce,
    server_nonce: Nonce,
}

impl ServerCheck {
    /// Whether the server knows the secret. False: end the connection, and believe nothing that came on it. Takes
    /// the same time wherever a wrong proof differs.
    #[must_use]
    pub fn holds(self, proof: &Proof) -> bool {
        self.secret.mac(SERVER_LABEL, &self.client_nonce, &self.server_nonce).verify_slice(proof).is_ok()
    }
}

/// The server's side of one connection.
#[derive(Debug)]
pub struct ServerHandshake {
    secret: Secret,
    /// Nonces of the client and the server; taken by the one attempt they are good for.
    challenge: Option<(Nonce, Nonce)>,
}

impl ServerHandshake {
    /// For a connection that has proved nothing yet.
    pub fn new(secret: Secret) -> Self {
        Self { secret, challenge: None }
    }

    /// Answers Challenge with a fresh nonce. An earlier challenge is void.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the kernel gives no random bytes.
    pub fn challenge(&mut self, client_nonce: &Nonce) -> Result<Nonce> {
        self.challenge = None;
        let nonce = random::bytes()?;
        self.challenge = Some((*client_nonce, nonce));
        Ok(nonce)
    }

    /// Judges Authenticate. `Some`: the client knows the secret, and this is the answer. `None`: it does not, or
    /// there was no challenge. Either way the challenge is used up. Takes the same time wherever a wrong proof
    /// differs.
    #[must_use]
    pub fn authenticate(&mut self, client_proof: &Proof) -> Option<Proof> {
        let (client, server) = self.challenge.take()?;
        self.secret.mac(CLIENT_LABEL, &server, &client).verify_slice(client_proof).ok()?;
        Some(self.secret.mac(SERVER_LABEL, &client, &server).finalize().into_bytes().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn secret(text: &str) -> Secret {
        Secret::new(Zeroizing::new(text.as_bytes().to_vec())).unwrap()
    }

    fn hex(text: &str) -> Vec<u8> {
        (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
    }

    #[test]
    fn the_mac_is_hmac_sha_256() {
        // RFC 4231, cases 1, 2, 3 and 6.
        let cases: [(Vec<u8>, Vec<u8>, &str); 4] = [
            (
                vec![0x0b; 20],
                b"Hi There".to_vec(),
                "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7",
            ),
            (
                b"Jefe".to_vec(),
                b"what do ya want for nothing?".to_vec(),
                "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
            ),
            (
                vec![0xaa; 20],
                vec![0xdd; 50],
                "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe",
            ),
            (
                vec![0xaa; 131],
                b"Test Using Larger Than Block-Size Key - Hash Key First".to_vec(),
                "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
            ),
        ];
        for (key, text, want) in cases {
            let (first, second) = text.split_at(3);
            assert_eq!(mac(&key, &[first, second]).finalize().into_bytes().to_vec(), hex(want));
        }
    }

    #[test]
    fn both_proofs_are_what_is_documented() {
        let handshake = ClientHandshake { secret: secret("0123456789abcdef"), nonce: [1; 32] };
        let (client_proof, check) = handshake.prove(&[2; 32]);
        assert_eq!(
            client_proof.to_vec(),
            hex("50de5872ab9c97b016b873331b2e4fa53e05781b4b07a40f9b19f0bca677ac50")
        );
        let mut server = ServerHandshake::new(secret("0123456789abcdef"));
        server.challenge = Some(([1; 32], [2; 32]));
        let server_proof = server.authenticate(&client_proof).unwrap();
        assert_eq!(
            server_proof.to_vec(),
            hex("8f9b873cd4cd3371794032d1c3420ebb2309b02492b593a00e986fb8e3a02a7f")
        );
        assert!(check.holds(&server_proof));
    }

    #[test]
    fn a_proof_is_good_once_and_for_its_own_challenge() {
        let secret = secret("a secret of some length");
        let mut server = ServerHandshake::new(secret.clone());
        assert!(server.authenticate(&[0; 32]).is_none(), "no challenge");
        let client = ClientHandshake::begin(&secret).unwrap();
        let client_nonce = *client.nonce();
        let nonce = server.challenge(&client_nonce).unwrap();
        let (proof, check) = client.prove(&nonce);
        let answer = server.authenticate(&proof).expect("the right proof");
        assert!(check.holds(&answer));
        assert!(server.authenticate(&proof).is_none(), "replayed at once");
        let again = server.challenge(&client_nonce).unwrap();
        assert_ne!(again, nonce);
        assert!(server.authenticate(&proof).is_none(), "replayed to a new challenge");
        // A wrong attempt uses the challenge up.
        let client = ClientHandshake::begin(&secret).unwrap();
        let nonce = server.challenge(client.nonce()).unwrap();
        let (proof, _) = client.prove(&nonce);
        assert!(server.authenticate(&[0; 32]).is_none());
        assert!(server.authenticate(&proof).is_none());
    }

    #[test]
    fn neither_side_believes_another_secret_or_a_changed_bit() {
        let (right, wrong) = (secret("the right secret"), secret("the wrong secret"));
        let attempt = |client: &Secret, server: &Secret, flip: usize| {
            let mut server = ServerHandshake::new(server.clone());
            let client = ClientHandshake::begin(client).unwrap();
            let nonce = server.challenge(client.nonce()).unwrap();
            let (mut proof, check) = client.prove(&nonce);
            if flip < 256 {
                proof[flip / 8] ^= 1 << (flip % 8);
            }
            (server.authenticate(&proof), check)
        };
        assert!(attempt(&wrong, &right, 256).0.is_none());
        for flip in 0..256 {
            assert!(attempt(&right, &right, flip).0.is_none(), "bit {flip}");
            let (answer, check) = attempt(&right, &right, 256);
            let mut answer = answer.unwrap();
            answer[flip / 8] ^= 1 << (flip % 8);
            assert!(!check.holds(&answer), "bit {flip}");
        }
        // An impostor that sends the client's own proof back.
        let client = ClientHandshake::begin(&right).unwrap();
        let nonce = *client.nonce();
        let (proof, check) = client.prove(&nonce);
        assert!(!check.holds(&proof));
    }

    #[test]
    fn a_secret_shows_nowhere() {
        let secret = secret("a very telling secret");
        let handshake = ClientHandshake::begin(&secret).unwrap();
        let text = format!("{secret:?} {handshake:?} {:?}", ServerHandshake::new(secret.clone()));
        assert!(!text.contains("telling") && text.contains("Secret(..)"), "{text}");
    }

    #[test]
    fn files_are_read_without_their_newline_or_refused_with_the_reason() {
        let path = std::env::temp_dir().join(format!("hotslice-secret-{}", std::process::id()));
        let read = |content: &[u8], mode: u32| {
            let _ = std::fs::remove_file(&path);
            std::fs::write(&path, content).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            Secret::read(&path)
        };
        let bytes = |content: &[u8]| read(content, 0o600).unwrap().0.to_vec();
        assert_eq!(bytes(b"0123456789abcdef\n"), b"0123456789abcdef");
        assert_eq!(bytes(b"0123456789abcdef\n\n"), b"0123456789abcdef\n");
        assert_eq!(bytes(&[0; 4096]), [0; 4096]);
        assert_eq!(bytes(&[[1; 4096].as_slice(), b"\n"].concat()), [1; 4096]);
        assert!(read(b"0123456789abcdef", 0o440).is_ok());
        let cases: [(&[u8], u32, &str); 6] = [
            (b"0123456789abcde\n", 0o600, "15 bytes: 16 to 4096"),
            (b"", 0o600, "0 bytes"),
            (&[0; 4097], 0o600, "4097 or more"),
            (b"0123456789abcdef", 0o604, "0604"),
            (b"0123456789abcdef", 0o602, "chmod o="),
            (b"0123456789abcdef", 0o601, "0601"),
        ];
        for (content, mode, word) in cases {
            let error = read(content, mode).unwrap_err().to_string();
            assert!(error.contains(word) && error.contains("secret_file"), "{error}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(Secret::read(&path).unwrap_err().to_string().contains("can be read"));
        assert!(Secret::read(Path::new("/")).unwrap_err().to_string().contains("regular file"));
    }
}
