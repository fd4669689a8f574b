//! Peers: which one holds a key, what waits for it, and how long it is left alone after it refused.

use super::errands::Errand;
use super::fills::FillId;
use crate::key::OwnedKey;
use crate::{Address, Error};
use std::collections::VecDeque;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, Instant};

/// Failed attempts to connect in a row after which a peer is tried again only when somebody asks for one of its keys.
const RECONNECTS_MAX: u32 = 16;

pub(super) struct Peer {
    pub(super) address: Address,
    /// The address as text, by which clients agree on a key's peer.
    name: String,
    pub(super) queues: Queues,
    /// Numbers of its lanes, in every state.
    pub(super) lanes: Vec<u64>,
    failures: u32,
    /// Attempts to connect for nobody since the last answer.
    reconnects: u32,
    /// When the next of them is due.
    reconnect_at: Option<Instant>,
    /// It has delivered something since the cache was opened.
    was_up: bool,
    /// State of the random numbers.
    dice: u64,
    /// Connections lost before they answered, since the last answer.
    lost: u32,
    /// Not to be tried again before this moment, and why.
    shunned: Option<(Instant, Error)>,
}

/// What no lane of a peer has been given yet. May name fills that have ended.
#[derive(Default)]
pub(super) struct Queues {
    /// Fills about which the peer is to be asked in one request each.
    pub(super) locates: VecDeque<Vec<FillId>>,
    /// Fills of known, small values that have room.
    pub(super) small: VecDeque<FillId>,
    /// Fills of which nothing is known: the first bytes are asked for, and with them comes the rest of the knowledge.
    pub(super) heads: VecDeque<FillId>,
    /// Fills of large values that have room, of which parts are to be asked for, in turn.
    pub(super) bulk: VecDeque<FillId>,
    /// Parts for other shards.
    pub(super) errands: VecDeque<Errand>,
}

impl Queues {
    pub(super) fn is_empty(&self) -> bool {
        self.locates.is_empty() && self.small.is_empty() && self.heads.is_empty() && self.bulk.is_empty() && self.errands.is_empty()
    }

    /// Takes every fill out.
    pub(super) fn take_all(&mut self) -> Vec<FillId> {
        let located = self.locates.drain(..).flatten();
        located.chain(self.small.drain(..)).chain(self.heads.drain(..)).chain(self.bulk.drain(..)).collect()
    }
}

impl Peer {
    pub(super) fn new(address: Address) -> Self {
        Self {
            name: address.to_string(),
            address,
            queues: Queues::default(),
            lanes: Vec::new(),
            failures: 0,
            reconnects: 0,
            reconnect_at: None,
            was_up: false,
            dice: RandomState::new().build_hasher().finish(),
            lost: 0,
            shunned: None,
        }
    }

    /// Why the peer is not to be tried now.
    pub(super) fn shunned(&self, now: Instant) -> Option<&Error> {
        self.shunned.as_ref().filter(|(until, _)| now < *until).map(|(_, why)| why)
    }

    /// A lane failed before it ever delivered: leave the peer alone, twice as long each time, and at least as long as
    /// finding out took. So keys on a dead peer wait for it half of the time at most, and fail at once otherwise.
    ///
    /// The pause is shortened by up to a quarter at random, so that many clients do not come back at one moment.
    pub(super) fn failed(&mut self, now: Instant, why: Error, took: Duration, min: Duration, max: Duration) {
        let pause = self.pause(self.failures, min, max).max(took);
        self.failures = self.failures.saturating_add(1);
        self.shunned = Some((now + pause, why));
        self.reconnect_at = Some(now + pause);
    }

    /// A connection that nobody waited for could not be had, or was lost at once. Nobody has to suffer for that: whoever
    /// asks tries for himself.
    pub(super) fn reconnect_failed(&mut self, now: Instant, min: Duration, max: Duration) {
        let pause = self.pause(self.reconnects, min, max);
        self.reconnect_at = Some(now + pause);
    }

    /// Doubled with every failure, and shortened at random.
    fn pause(&mut self, failures: u32, min: Duration, max: Duration) -> Duration {
        let doubled = min.saturating_mul(1u32.checked_shl(failures).unwrap_or(u32::MAX)).min(max);
        self.dice = mix(self.dice.wrapping_add(0x9e37_79b9_7f4a_7c15));
        doubled - doubled / 4 * u32::from(self.dice as u16) / u32::from(u16::MAX)
    }

    /// When an idle shard should connect again to a peer that it lost, so that the next fill finds a lane: only as long
    /// as the peer is not likely to be gone for good.
    pub(super) fn reconnect_at(&self) -> Option<Instant> {
        let lost = self.lanes.is_empty() && self.was_up && self.reconnects < RECONNECTS_MAX;
        self.reconnect_at.filter(|_| lost)
    }

    /// The shard connects again for nobody.
    pub(super) fn reconnecting(&mut self) {
        self.reconnects += 1;
        self.reconnect_at = None;
    }

    /// A connection was made and lost before it answered. Returns how many that were since the last answer.
    pub(super) fn lost_in_a_row(&mut self) -> u32 {
        self.lost = self.lost.saturating_add(1);
        self.lost
    }

    /// A lane delivered an answer.
    pub(super) fn delivered(&mut self) {
        self.failures = 0;
        self.reconnects = 0;
        self.reconnect_at = None;
        self.lost = 0;
        self.shunned = None;
        self.was_up = true;
    }
}

/// The peer that holds a key: the highest of one score per peer (rendezvous hashing, Thaler and Ravishankar
/// 1998), so that every client agrees, and a peer more or less moves only its own share of the keys.
pub(super) fn choose(peers: &[Peer], namespace: &str, key: &OwnedKey) -> usize {
    if peers.len() == 1 {
        return 0;
    }
    // Not the table's hash: that one is seeded per cache, and clients must agree with each other.
    let base = crc32c::crc32c_append(crc32c::crc32c(namespace.as_bytes()), &key.bytes);
    let score = |peer: &Peer| {
        mix(u64::from(crc32c::crc32c_append(base, peer.name.as_bytes())) << 32 | u64::from(base))
    };
    (0..peers.len()).max_by_key(|&i| score(&peers[i])).unwrap_or(0)
}

/// Spreads a checksum over 64 bits (the finaliser of SplitMix64, Steele, Lea and Flood 2014).
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Namespace;

    fn key(i: u32) -> OwnedKey {
        Namespace::DEFAULT.key(&i.to_le_bytes()).to_owned()
    }

    fn peers(ports: std::ops::Range<u16>) -> Vec<Peer> {
        ports.map(|port| Peer::new(([127, 0, 0, 1], port).into())).collect()
    }

    #[test]
    fn keys_spread_evenly_and_stay_when_a_peer_goes() {
        let (four, three) = (peers(1000..1004), peers(1000..1003));
        let mut counts = [0u32; 4];
        for i in 0..8000 {
            let chosen = choose(&four, "", &key(i));
            counts[chosen] += 1;
            if chosen < 3 {
                assert_eq!(choose(&three, "", &key(i)), chosen);
            }
        }
        assert!(counts.iter().all(|&n| (1700..2300).contains(&n)), "{counts:?}");
    }

    #[test]
    fn pauses_double_up_to_the_limit_and_end_with_a_delivery() {
        let mut peer = Peer::new(([127, 0, 0, 1], 1).into());
        let (now, min, max) = (Instant::now(), Duration::from_millis(10), Duration::from_millis(35));
        for pause_ms in [10, 20, 35, 35] {
            peer.failed(now, Error::ShutDown, Duration::ZERO, min, max);
            assert!(peer.shunned(now + Duration::from_millis(pause_ms * 3 / 4 - 1)).is_some());
            assert!(peer.shunned(now + Duration::from_millis(pause_ms)).is_none());
        }
        for _ in 0..100 {
            peer.failed(now, Error::ShutDown, Duration::ZERO, min, max);
        }
        let took = Duration::from_secs(2);
        peer.failed(now, Error::ShutDown, took, min, max);
        assert!(peer.shunned(now + took - max).is_some(), "as long as it took to fail");
        assert!(peer.shunned(now + took).is_none());
        peer.delivered();
        assert!(peer.shunned(now).is_none());
    }
}
