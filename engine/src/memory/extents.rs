//! Extents and the small list of them that a value is made of. Plain numbers: no addresses.

use std::fmt;
use std::ops::Deref;

use super::GRANULE_BYTES;

/// A run of granules inside one block.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Extent {
    /// First granule, counted over the whole arena.
    pub start: u32,
    /// Number of granules.
    pub len: u32,
}

impl Extent {
    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.len as usize * GRANULE_BYTES
    }

    /// The granule behind the last one.
    pub fn end(&self) -> u32 {
        self.start + self.len
    }
}

/// Extents that an [`ExtentList`] holds without memory of its own.
const INLINE_EXTENTS: usize = 3;

/// The extents of one allocation, in the order in which they hold its bytes.
///
/// Up to three lie in the list itself; more go to the heap, which only values larger than a block or a
/// fragmented arena cause.
#[derive(Clone)]
pub struct ExtentList(Repr);

#[derive(Clone)]
enum Repr {
    Inline { len: u8, extents: [Extent; INLINE_EXTENTS] },
    Heap(Vec<Extent>),
}

impl ExtentList {
    /// An empty list. Does not allocate.
    pub const fn new() -> Self {
        ExtentList(Repr::Inline { len: 0, extents: [Extent { start: 0, len: 0 }; INLINE_EXTENTS] })
    }

    /// Appends an extent.
    pub fn push(&mut self, extent: Extent) {
        match &mut self.0 {
            Repr::Inline { len, extents } if (*len as usize) < INLINE_EXTENTS => {
                extents[*len as usize] = extent;
                *len += 1;
            }
            Repr::Inline { extents, .. } => {
                let mut list = Vec::with_capacity(2 * INLINE_EXTENTS);
                list.extend_from_slice(extents);
                list.push(extent);
                self.0 = Repr::Heap(list);
            }
            Repr::Heap(list) => list.push(extent),
        }
    }

    /// Sum of the extents' lengths in granules.
    pub fn granules(&self) -> u32 {
        self.iter().map(|extent| extent.len).sum()
    }
}

impl Deref for ExtentList {
    type Target = [Extent];

    fn deref(&self) -> &[Extent] {
        match &self.0 {
            Repr::Inline { len, extents } => &extents[..*len as usize],
            Repr::Heap(list) => list,
        }
    }
}

impl Default for ExtentList {
    fn default() -> Self {
        Self::new()
    }
}

impl PartialEq for ExtentList {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for ExtentList {}

impl fmt::Debug for ExtentList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl FromIterator<Extent> for ExtentList {
    fn from_iter<I: IntoIterator<Item = Extent>>(extents: I) -> Self {
        let mut list = ExtentList::new();
        extents.into_iter().for_each(|extent| list.push(extent));
        list
    }
}

impl<'a> IntoIterator for &'a ExtentList {
    type Item = &'a Extent;
    type IntoIter = std::slice::Iter<'a, Extent>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_holds_what_was_pushed_across_the_spill() {
        let mut list = ExtentList::new();
        let mut expected = Vec::new();
        assert!(list.is_empty());
        for index in 0..10 {
            let extent = Extent { start: 100 * index, len: index + 1 };
            list.push(extent);
            expected.push(extent);
            assert_eq!(*list, *expected);
            assert_eq!(matches!(list.0, Repr::Inline { .. }), expected.len() <= 3);
            assert_eq!(expected.iter().copied().collect::<ExtentList>(), list);
        }
        assert_eq!(list.granules(), 55);
        assert_eq!(format!("{:?}", ExtentList::new()), "[]");
    }

    #[test]
    fn a_list_is_small() {
        assert!(size_of::<ExtentList>() <= 32, "it lies in every slot");
    }
}
