//! Keys that the origin lately said it does not have, so that asking again at once costs no round trip.
//!
//! Only the origin's own word is remembered, never a failure: absent is not unknown. The memory is short (milliseconds)
//! and small, since another writer may put the key at the origin without telling this cache; a put or an invalidation
//! through this cache ends it at once.

use super::request::Scope;
use crate::key::{Key, OwnedKey};
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Keys remembered at most; beyond that the oldest are forgotten.
const KEYS_MAX: usize = 65_536;

pub(super) struct Absent {
    /// By hash. Of two keys with one hash the later is remembered.
    keys: HashMap<u64, (OwnedKey, Instant)>,
    /// Hashes in the order in which they were remembered, which is about that in which they expire; outdated entries are skipped when they come up.
    order: VecDeque<(Instant, u64)>,
}

impl Absent {
    pub(super) fn new() -> Self {
        Self { keys: HashMap::new(), order: VecDeque::new() }
    }

    /// The origin has just said that it has no such key, which is good for `ttl`; zero remembers nothing.
    pub(super) fn remember(&mut self, hash: u64, key: OwnedKey, now: Instant, ttl: Duration) {
        if ttl.is_zero() {
            return;
        }
        let until = now + ttl;
        self.keys.insert(hash, (key, until));
        self.order.push_back((until, hash));
        while self.order.front().is_some_and(|&(until, _)| until <= now) || self.order.len() > KEYS_MAX {
            let Some((until, hash)) = self.order.pop_front() else { return };
            if self.keys.get(&hash).is_some_and(|&(_, remembered)| remembered == until) {
                self.keys.remove(&hash);
            }
        }
    }

    /// True if the origin's word on the key is fresh.
    pub(super) fn contains(&self, hash: u64, key: Key<'_>, now: Instant) -> bool {
        self.keys.get(&hash).is_some_and(|(known, until)| now < *until && known.borrow() == key)
    }

    /// The key has a value now.
    pub(super) fn forget(&mut self, hash: u64) {
        self.keys.remove(&hash);
    }

    /// Forgets what `scope` covers.
    pub(super) fn invalidate(&mut self, scope: &Scope) {
        match scope {
            Scope::Key(hash, _) => self.forget(*hash),
            _ => self.keys.retain(|_, (key, _)| !scope.covers(key.borrow())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Namespace;

    fn key(text: &str) -> Key<'_> {
        Namespace::DEFAULT.key(text)
    }

    #[test]
    fn a_word_is_good_for_its_time_and_until_the_key_is_touched() {
        let (start, ttl) = (Instant::now(), Duration::from_millis(100));
        let mut absent = Absent::new();
        absent.remember(1, key("a").to_owned(), start, ttl);
        absent.remember(2, key("ab").to_owned(), start, ttl);
        assert!(absent.contains(1, key("a"), start + ttl - Duration::from_nanos(1)));
        assert!(!absent.contains(1, key("a"), start + ttl));
        assert!(!absent.contains(1, key("b"), start), "another key of the same hash");
        absent.forget(1);
        assert!(!absent.contains(1, key("a"), start));
        absent.invalidate(&Scope::Prefix(key("a").to_owned()));
        assert!(!absent.contains(2, key("ab"), start));
        let mut never = Absent::new();
        never.remember(1, key("a").to_owned(), start, Duration::ZERO);
        assert!(!never.contains(1, key("a"), start));
    }

    #[test]
    fn memory_stays_bounded_and_a_renewed_word_outlives_the_old_one() {
        let (start, ttl) = (Instant::now(), Duration::from_millis(100));
        let mut absent = Absent::new();
        absent.remember(7, key("a").to_owned(), start, ttl);
        absent.remember(7, key("a").to_owned(), start + ttl / 2, ttl);
        absent.remember(8, key("b").to_owned(), start + ttl, ttl);
        assert!(absent.contains(7, key("a"), start + ttl), "the first word's end is not the second's");
        for i in 0..KEYS_MAX as u64 + 1000 {
            absent.remember(i + 100, key("x").to_owned(), start + ttl, ttl);
        }
        assert!(absent.keys.len() <= KEYS_MAX && absent.order.len() <= KEYS_MAX);
        absent.remember(1, key("z").to_owned(), start + ttl * 3, ttl);
        assert_eq!((absent.keys.len(), absent.order.len()), (1, 1), "what has expired is gone");
    }
}
