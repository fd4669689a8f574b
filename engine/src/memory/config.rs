//! Policies and sizes of an arena, and what is allowed for them.
//!
//! Knows the kernel's page sizes as numbers only; maps nothing.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{GRANULE_BYTES, MemoryError};

/// Smallest block in bytes: 64 KiB, the largest base page of the supported architectures.
pub const MIN_BLOCK_BYTES: usize = 64 << 10;
/// Largest block in bytes: 1 GiB, the largest registered buffer io_uring takes.
pub const MAX_BLOCK_BYTES: usize = 1 << 30;
/// Smallest block in bytes unless pages are off: the transparent hugepage of kernels with 4 KiB pages.
const MIN_HUGE_BLOCK_BYTES: usize = 2 << 20;

/// Which pages an arena may be made of.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PagePolicy {
    /// Explicit hugepages (hugetlb) for every block, or an error.
    Required,
    /// The best rung of the ladder that can be had, block by block.
    #[default]
    Preferred,
    /// Base pages only; transparent hugepages are declined.
    Off,
}

/// Whether an arena must be locked into memory.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LockPolicy {
    /// Every byte is locked, or an error.
    Required,
    /// Locked where the limit allows it; a warning in the report where it does not.
    #[default]
    Preferred,
    /// Not locked. Explicit hugepages are resident all the same.
    Off,
}

/// Whether an arena's memory is to lie on the NUMA node of its shard's core.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NumaPolicy {
    /// It is asked for there, where there is more than one node; a refusal is a warning.
    #[default]
    Local,
    /// Nothing is asked for: the process's memory policy decides, usually by the first touch, which is the shard's.
    Off,
}

impl fmt::Display for NumaPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Local => "local",
            Self::Off => "off",
        })
    }
}

impl FromStr for NumaPolicy {
    type Err = MemoryError;

    fn from_str(text: &str) -> Result<Self, MemoryError> {
        match text {
            "local" => Ok(Self::Local),
            "off" => Ok(Self::Off),
            _ => Err(MemoryError::Config {
                setting: "numa",
                value: format!("`{}`", text.escape_debug()),
                allowed: "allowed are local and off".into(),
            }),
        }
    }
}

/// What a block is really made of.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PageKind {
    /// Explicit hugepages out of the kernel's pool: never swapped, never split.
    HugeTlb,
    /// Transparent hugepages, seen in smaps. [`Block::huge_bytes`](super::Block::huge_bytes) says how much
    /// of the block they cover.
    Transparent,
    /// Base pages.
    Base,
}

macro_rules! policy_text {
    ($policy:ty, $setting:literal) => {
        impl fmt::Display for $policy {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self {
                    Self::Required => "required",
                    Self::Preferred => "preferred",
                    Self::Off => "off",
                })
            }
        }

        impl FromStr for $policy {
            type Err = MemoryError;

            /// Reads `required`, `preferred` or `off`, in any case.
            fn from_str(text: &str) -> Result<Self, MemoryError> {
                [Self::Required, Self::Preferred, Self::Off]
                    .into_iter()
                    .find(|policy| policy.to_string().eq_ignore_ascii_case(text))
                    .ok_or_else(|| MemoryError::Config {
                        setting: $setting,
                        value: format!("`{}`", text.escape_debug()),
                        allowed: "allowed are required, preferred and off".into(),
                    })
            }
        }
    };
}

policy_text!(PagePolicy, "pages");
policy_text!(LockPolicy, "lock");

impl fmt::Display for PageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::HugeTlb => "hugetlb",
            Self::Transparent => "transparent",
            Self::Base => "base",
        })
    }
}

/// What an [`Arena`](super::Arena) is to be.
#[derive(Clone, Eq, PartialEq, Debug)]
pub struct ArenaConfig {
    /// Most bytes the arena may take. Whole blocks are mapped; what is left over is reported as remainder.
    pub capacity_bytes: usize,
    /// Most bytes that it may be grown to later; 0: `capacity_bytes`. Only bookkeeping is sized for it.
    pub capacity_max_bytes: usize,
    /// Bytes per block: a power of two from 2 MiB (64 KiB if `pages` is off, one hugepage if it is
    /// required) to 1 GiB.
    pub block_bytes: usize,
    /// Which pages it may be made of.
    pub pages: PagePolicy,
    /// Whether it must be locked.
    pub lock: LockPolicy,
    /// Whether its memory is asked for on `node`.
    pub numa: NumaPolicy,
    /// NUMA node of the core that works with it, if it is known.
    pub node: Option<u32>,
}

impl ArenaConfig {
    /// Checks the sizes and returns the number of blocks. `hugetlb_page_bytes` is the size of the
    /// kernel's explicit hugepages, 0 if it has none.
    pub(super) fn block_count(&self, hugetlb_page_bytes: usize) -> Result<usize, MemoryError> {
        let min_bytes = match self.pages {
            PagePolicy::Required => hugetlb_page_bytes.max(MIN_BLOCK_BYTES),
            PagePolicy::Preferred => MIN_HUGE_BLOCK_BYTES,
            PagePolicy::Off => MIN_BLOCK_BYTES,
        };
        let allowed = min_bytes..=MAX_BLOCK_BYTES;
        if !self.block_bytes.is_power_of_two() || !allowed.contains(&self.block_bytes) {
            return Err(MemoryError::Config {
                setting: "block_bytes",
                value: self.block_bytes.to_string(),
                allowed: format!(
                    "with pages={} a block is a power of two from {min_bytes} to {MAX_BLOCK_BYTES} bytes",
                    self.pages
                ),
            });
        }
        self.blocks_of("capacity_bytes", self.capacity_bytes, 1)
    }

    /// Most blocks that there can be later, at least `block_count`.
    pub(super) fn block_count_max(&self, block_count: usize) -> Result<usize, MemoryError> {
        match self.capacity_max_bytes {
            0 => Ok(block_count),
            bytes => self.blocks_of("capacity_max_bytes", bytes, block_count),
        }
    }

    fn blocks_of(&self, setting: &'static str, bytes: usize, least: usize) -> Result<usize, MemoryError> {
        let blocks = bytes / self.block_bytes;
        // Granule numbers are 32 bits wide, and u32::MAX means "none" in the allocator.
        let max_blocks = (u32::MAX as usize) / (self.block_bytes / GRANULE_BYTES);
        if (least..=max_blocks).contains(&blocks) {
            return Ok(blocks);
        }
        Err(MemoryError::Config {
            setting,
            value: bytes.to_string(),
            allowed: format!(
                "an arena holds {least} to {max_blocks} blocks of {} bytes (block_bytes)",
                self.block_bytes
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(capacity_bytes: usize, block_bytes: usize, pages: PagePolicy) -> ArenaConfig {
        ArenaConfig {
            capacity_bytes,
            capacity_max_bytes: 0,
            block_bytes,
            pages,
            lock: LockPolicy::Off,
            numa: NumaPolicy::Off,
            node: None,
        }
    }

    #[test]
    fn policies_are_read_as_they_are_printed() {
        for policy in [PagePolicy::Required, PagePolicy::Preferred, PagePolicy::Off] {
            assert_eq!(policy.to_string().parse::<PagePolicy>().unwrap(), policy);
            let json = serde_json::to_string(&policy).unwrap();
            assert_eq!(json, format!("\"{policy}\""));
            assert_eq!(serde_json::from_str::<PagePolicy>(&json).unwrap(), policy);
        }
        assert_eq!("OFF".parse::<LockPolicy>().unwrap(), LockPolicy::Off);
        let error = " off\n".parse::<LockPolicy>().unwrap_err().to_string();
        assert!(error.contains("`lock`") && error.contains("` off\\n`"), "{error}");
        assert!(error.contains("required, preferred and off"), "{error}");
    }

    #[test]
    fn sizes_are_checked_with_their_setting_named() {
        let huge = 2 << 20;
        for (bad, setting) in [
            (config(64 << 20, 0, PagePolicy::Off), "block_bytes"),
            (config(64 << 20, 3 << 20, PagePolicy::Preferred), "block_bytes"),
            (config(64 << 20, 1 << 20, PagePolicy::Preferred), "block_bytes"),
            (config(64 << 20, 1 << 20, PagePolicy::Required), "block_bytes"),
            (config(64 << 20, 32 << 10, PagePolicy::Off), "block_bytes"),
            (config(4 << 30, 2 << 30, PagePolicy::Off), "block_bytes"),
            (config((16 << 20) - 1, 16 << 20, PagePolicy::Preferred), "capacity_bytes"),
            (config(0, 16 << 20, PagePolicy::Preferred), "capacity_bytes"),
            (config(usize::MAX, 16 << 20, PagePolicy::Preferred), "capacity_bytes"),
        ] {
            match bad.block_count(huge) {
                Err(MemoryError::Config { setting: named, .. }) => assert_eq!(named, setting, "{bad:?}"),
                other => panic!("{bad:?} gave {other:?}"),
            }
        }
        assert_eq!(config(400_000_000, 16 << 20, PagePolicy::Preferred).block_count(huge).unwrap(), 23);
        assert_eq!(config(64 << 10, 64 << 10, PagePolicy::Off).block_count(huge).unwrap(), 1);
        // A kernel with 64 KiB pages has hugepages of 512 MiB: required asks for such blocks, preferred goes
        // down the ladder.
        let large = 512 << 20;
        assert!(config(1 << 30, 16 << 20, PagePolicy::Required).block_count(large).is_err());
        assert_eq!(config(1 << 30, 16 << 20, PagePolicy::Preferred).block_count(large).unwrap(), 64);
    }
}
