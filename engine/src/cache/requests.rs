//! What callers pass to the batch forms and to `invalidate`.

use crate::key::{Key, Namespace};

/// What [`Cache::invalidate`] forgets.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Invalidate<'a> {
    /// One key.
    Key(Key<'a>),
    /// Every key of a namespace that starts with these bytes.
    Prefix(Namespace, &'a [u8]),
    /// Every key of a namespace.
    Namespace(Namespace),
    /// Everything.
    All,
}

/// One position of [`Cache::get_into_batch`].
#[derive(Debug)]
pub struct Read<'a> {
    /// What to read.
    pub key: Key<'a>,
    /// Where to copy it; at least as long as the value.
    pub into: &'a mut [u8],
}

/// One position of [`Cache::get_scatter_batch`].
#[derive(Debug)]
pub struct ReadScatter<'a, 'b> {
    /// What to read.
    pub key: Key<'a>,
    /// Where to copy it: filled one after the other; together at least as long as the value.
    pub into: &'a mut [&'b mut [u8]],
}

/// One position of [`Cache::get_range_batch`].
#[derive(Debug)]
pub struct ReadRange<'a> {
    /// What to read.
    pub key: Key<'a>,
    /// First byte of the value to copy.
    pub offset: u64,
    /// Where to copy it; its length says how many bytes.
    pub into: &'a mut [u8],
}
