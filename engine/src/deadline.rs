//! Deadlines: the moment at which a caller stops waiting.

use std::time::{Duration, Instant};

/// When a call gives up. Made from a [`Duration`] from now, or an [`Instant`].
///
/// A hit never looks at it: what is in the cache is returned whatever the deadline. A miss whose deadline
/// has passed fails at once and starts nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(pub(crate) Instant);

/// A span that stands for "for ever" where the clock cannot add what was asked for: about thirty years.
const FAR: Duration = Duration::from_secs(1_000_000_000);

impl Deadline {
    /// `ms` milliseconds from now.
    pub fn after_ms(ms: u64) -> Self {
        Duration::from_millis(ms).into()
    }

    /// The moment itself.
    pub fn instant(self) -> Instant {
        self.0
    }

    pub(crate) fn has_passed(self) -> bool {
        self.0 <= Instant::now()
    }
}

impl From<Duration> for Deadline {
    fn from(after: Duration) -> Self {
        let now = Instant::now();
        Self(now.checked_add(after.min(FAR)).unwrap_or(now))
    }
}

impl From<Instant> for Deadline {
    fn from(at: Instant) -> Self {
        Self(at)
    }
}
