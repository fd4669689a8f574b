//! Extents and short lists of them.

/// A contiguous run of granules inside one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// First granule, counted over all blocks of the arena.
    pub start: u32,
    /// Length in granules.
    pub len: u32,
}

const INLINE: usize = 2;

/// The extents of one value, in order. Up to two stand in the list itself, more in a heap vector: most
/// values are one extent, values that span blocks a few.
#[derive(Clone, Debug)]
pub struct ExtentList(Repr);

#[derive(Clone, Debug)]
enum Repr {
    Inline(u8, [Extent; INLINE]),
    Heap(Vec<Extent>),
}

impl Default for ExtentList {
    fn default() -> Self {
        Self(Repr::Inline(0, [Extent { start: 0, len: 0 }; INLINE]))
    }
}

impl ExtentList {
    /// Appends an extent.
    pub fn push(&mut self, extent: Extent) {
        match &mut self.0 {
            Repr::Inline(len, extents) if (*len as usize) < INLINE => {
                extents[*len as usize] = extent;
                *len += 1;
            }
            Repr::Inline(_, extents) => {
                let mut heap = Vec::with_capacity(2 * INLINE);
                heap.extend_from_slice(extents);
                heap.push(extent);
                self.0 = Repr::Heap(heap);
            }
            Repr::Heap(extents) => extents.push(extent),
        }
    }
}

impl std::ops::Deref for ExtentList {
    type Target = [Extent];

    fn deref(&self) -> &[Extent] {
        match &self.0 {
            Repr::Inline(len, extents) => &extents[..*len as usize],
            Repr::Heap(extents) => extents,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_order_across_the_move_to_the_heap() {
        let mut list = ExtentList::default();
        for n in 0..7 {
            assert_eq!(list.len(), n as usize);
            list.push(Extent { start: n, len: n + 1 });
            let copy = list.clone();
            assert!(copy.iter().enumerate().all(|(i, e)| (e.start, e.len) == (i as u32, i as u32 + 1)));
        }
    }
}
