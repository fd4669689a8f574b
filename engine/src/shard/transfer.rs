//! A value on its way into its room: which parts are still to be asked for, which have arrived. No I/O.

use super::store::Room;
use crate::wire::ResponseHeader;
use std::time::{Duration, Instant};

/// What the origin says about a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct About {
    pub(super) len: u64,
    pub(super) version: u64,
    pub(super) crc32c: u32,
}

impl About {
    /// Whether an answer brings this part of this value. The error is a breach of the protocol, in words.
    pub(super) fn check(&self, part: Part, header: &ResponseHeader) -> Result<(), String> {
        let got = About { len: header.value_len, version: header.value_version, crc32c: header.value_crc32c };
        let got_part = Part { offset: header.range_offset, len: header.body_len };
        match got_part == part && got == *self {
            true => Ok(()),
            false => Err(format!(
                "asked for bytes {}+{} of {self:?}, got {}+{} of {got:?}",
                part.offset, part.len, got_part.offset, got_part.len
            )),
        }
    }
}

/// A range of a value that is asked for and answered as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Part {
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// The bytes of one value, part by part, from any number of lanes in any order.
pub(super) struct Transfer {
    pub(super) about: About,
    pub(super) room: Room,
    /// Everything before it was asked for at least once.
    next: u64,
    /// Parts that are to be asked for again.
    again: Vec<Part>,
    /// Where the parts begin that were lost with a lane.
    lost_offsets: Vec<u64>,
    /// Parts that are here, with their CRC32C.
    arrived: Vec<(Part, u32)>,
    arrived_bytes: u64,
    /// Bytes received, those of parts that are not complete included.
    received_bytes: u64,
    started: Instant,
}

impl Transfer {
    pub(super) fn new(about: About, room: Room, now: Instant) -> Self {
        Self {
            about,
            room,
            next: 0,
            again: Vec::new(),
            lost_offsets: Vec::new(),
            arrived: Vec::new(),
            arrived_bytes: 0,
            received_bytes: 0,
            started: now,
        }
    }

    /// The first bytes came unasked, with the answer that told what the value is.
    pub(super) fn take_head(&mut self, len: u64) -> Part {
        debug_assert!(self.next == 0 && len <= self.about.len);
        self.next = len;
        Part { offset: 0, len }
    }

    /// The part to ask for next, of at most `stripe_bytes`.
    pub(super) fn next_part(&mut self, stripe_bytes: u64) -> Option<Part> {
        if let Some(part) = self.again.pop() {
            return Some(part);
        }
        let len = (self.about.len - self.next).min(stripe_bytes);
        let part = Part { offset: self.next, len };
        self.next += len;
        (len > 0).then_some(part)
    }

    /// True if [`Transfer::next_part`] has one.
    pub(super) fn wants_more(&self) -> bool {
        !self.again.is_empty() || self.next < self.about.len
    }

    /// True if the next part was lost with a lane before, and may be why.
    pub(super) fn has_lost(&self) -> bool {
        self.again.last().is_some_and(|part| self.lost_offsets.contains(&part.offset))
    }

    /// A part that was asked for will not come with this lane. Returns how often that has happened to it.
    pub(super) fn lose(&mut self, part: Part) -> u32 {
        self.again.push(part);
        self.lost_offsets.push(part.offset);
        self.lost_offsets.iter().filter(|&&offset| offset == part.offset).count() as u32
    }

    /// A part was not asked for after all.
    pub(super) fn put_back(&mut self, part: Part) {
        self.again.push(part);
    }

    /// Bytes of some part were received.
    pub(super) fn received(&mut self, bytes: u64) {
        self.received_bytes += bytes;
    }

    /// A part is here.
    pub(super) fn arrive(&mut self, part: Part, crc32c: u32) {
        self.arrived.push((part, crc32c));
        self.arrived_bytes += part.len;
    }

    /// True if every byte is here.
    pub(super) fn is_complete(&self) -> bool {
        self.arrived_bytes == self.about.len
    }

    /// CRC32C of the whole value, put together from those of its parts.
    pub(super) fn crc32c(&mut self) -> u32 {
        debug_assert!(self.is_complete());
        self.arrived.sort_unstable();
        let combine = |crc, &(part, next): &(Part, u32)| crc32c::crc32c_combine(crc, next, part.len as usize);
        match self.arrived.as_slice() {
            [(_, only)] => *only,
            all => all.iter().fold(0, combine),
        }
    }

    /// How long the rest will take at the speed so far; `None` if nothing has come yet.
    pub(super) fn time_left(&self, now: Instant) -> Option<Duration> {
        time_left(self.started, self.received_bytes, self.about.len, now)
    }
}

/// How long the rest of `len` bytes will take at the speed so far; `None` if nothing has come yet.
pub(super) fn time_left(started: Instant, received: u64, len: u64, now: Instant) -> Option<Duration> {
    let per_byte = now.saturating_duration_since(started).as_secs_f64() / received as f64;
    Duration::try_from_secs_f64(per_byte * len.saturating_sub(received) as f64).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::ExtentList;
    use proptest::prelude::*;

    fn transfer(bytes: &[u8]) -> Transfer {
        let about = About { len: bytes.len() as u64, version: 1, crc32c: crc32c::crc32c(bytes) };
        Transfer::new(about, Room { slot: 0, extents: ExtentList::new(), namespace: crate::Namespace::DEFAULT }, Instant::now())
    }

    proptest! {
        #[test]
        fn parts_cover_the_value_once_whatever_is_lost_and_in_whatever_order_they_come(
            bytes in proptest::collection::vec(any::<u8>(), 0..2000),
            head in 0usize..2000,
            stripe in 1u64..700,
            order in any::<prop::sample::Index>(),
            lose in proptest::collection::vec(any::<bool>(), 16),
        ) {
            let mut transfer = transfer(&bytes);
            let of = |part: Part| &bytes[part.offset as usize..(part.offset + part.len) as usize];
            let mut asked = vec![transfer.take_head(head.min(bytes.len()) as u64)];
            let mut lose = lose.into_iter();
            loop {
                while let Some(part) = transfer.next_part(stripe) {
                    prop_assert!(part.len > 0 && part.len <= stripe.max(head as u64));
                    asked.push(part);
                }
                prop_assert!(!transfer.wants_more());
                if asked.is_empty() {
                    break;
                }
                let part = asked.remove(order.index(asked.len()));
                if part.len > 0 && lose.next().unwrap_or(false) {
                    match part.offset % 2 {
                        0 => drop(transfer.lose(part)),
                        _ => transfer.put_back(part),
                    }
                    prop_assert!(transfer.wants_more());
                    prop_assert!(part.offset % 2 == 1 || transfer.has_lost());
                } else {
                    transfer.arrive(part, crc32c::crc32c(of(part)));
                }
            }
            prop_assert!(transfer.is_complete());
            prop_assert_eq!(transfer.crc32c(), transfer.about.crc32c);
        }
    }

    #[test]
    fn the_rest_is_expected_at_the_speed_so_far() {
        let mut transfer = transfer(&[7; 1000]);
        let then = transfer.started + Duration::from_secs(1);
        assert_eq!(transfer.time_left(then), None);
        transfer.received(250);
        assert_eq!(transfer.time_left(then), Some(Duration::from_secs(3)));
    }
}
