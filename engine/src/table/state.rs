//! The one atomic word of a slot: phase, pins and generation, and the transitions between them.
//!
//! ```text
//!           reserve             publish                 evict (pins = 0)
//!   Free ───────────► Filling ───────────► Ready ──────────────────────────► Free, generation + 1
//!    ▲                   │                   │ condemn
//!    │      cancel       │                   ▼
//!    ├───────────────────┘               Condemned ── last unpin, reclaim ──► Free, generation + 1
//! ```
//!
//! Only the shard (the table's one writer) moves a slot between phases. Readers only change the pins,
//! and only upwards from `Ready`: so once a slot has left `Ready` its pins can but fall.

/// What a slot is to its readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Belongs to the shard's free list.
    Free = 0,
    /// Belongs to a fill or a reservation; its entry is being written.
    Filling = 1,
    /// Its entry is published and may be pinned.
    Ready = 2,
    /// Unlinked while pinned: the pins that exist stay good, new ones are refused.
    Condemned = 3,
}

const PINS_BITS: u32 = 30;
/// Most pins a slot can have. A reader that would exceed it is refused and goes the way of a miss.
pub(crate) const PINS_MAX: u32 = (1 << PINS_BITS) - 1;
const PHASE_SHIFT: u32 = PINS_BITS;
const GENERATION_SHIFT: u32 = 32;

/// One pin, as an addend of the word.
pub(crate) const ONE_PIN: u64 = 1;

/// A value of the state word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct State(pub(crate) u64);

impl State {
    pub(crate) const fn new(generation: u32, phase: Phase, pins: u32) -> Self {
        Self(((generation as u64) << GENERATION_SHIFT) | ((phase as u64) << PHASE_SHIFT) | pins as u64)
    }

    pub(crate) const fn pins(self) -> u32 {
        (self.0 as u32) & PINS_MAX
    }

    pub(crate) const fn generation(self) -> u32 {
        (self.0 >> GENERATION_SHIFT) as u32
    }

    pub(crate) const fn phase(self) -> Phase {
        match (self.0 >> PHASE_SHIFT) & 0b11 {
            0 => Phase::Free,
            1 => Phase::Filling,
            2 => Phase::Ready,
            _ => Phase::Condemned,
        }
    }

    /// The same slot, given back to the free list: a new generation.
    pub(crate) const fn freed(self) -> Self {
        Self::new(self.generation().wrapping_add(1), Phase::Free, 0)
    }

    pub(crate) const fn with_phase(self, phase: Phase) -> Self {
        Self::new(self.generation(), phase, self.pins())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_overlap() {
        for phase in [Phase::Free, Phase::Filling, Phase::Ready, Phase::Condemned] {
            for generation in [0, 1, u32::MAX] {
                for pins in [0, 1, PINS_MAX] {
                    let state = State::new(generation, phase, pins);
                    assert_eq!((state.generation(), state.phase(), state.pins()), (generation, phase, pins));
                }
            }
        }
    }

    #[test]
    fn generation_wraps_without_touching_the_phase() {
        let freed = State::new(u32::MAX, Phase::Condemned, 0).freed();
        assert_eq!((freed.generation(), freed.phase(), freed.pins()), (0, Phase::Free, 0));
    }
}
