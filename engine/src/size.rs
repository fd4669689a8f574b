//! Sizes in bytes as people write them.

use crate::{Error, Result};

/// Suffixes and their bytes. Decimal units follow SI, binary ones IEC 80000-13.
const UNITS: [(&str, u64); 11] = [
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("KB", 1_000),
    ("kB", 1_000),
    ("B", 1),
    ("", 1),
];

/// Parses a size: digits, then nothing or one of `B`, `kB`, `KB`, `MB`, `GB`, `TB` (powers of 1000), `KiB`,
/// `MiB`, `GiB`, `TiB` (powers of 1024). The whole string counts: no sign, no fraction, no spaces. Letters
/// alone (`8G`) are refused, because they mean 1000 to some and 1024 to others.
///
/// `setting` is named in the error.
pub fn parse_bytes(setting: &'static str, text: &str) -> Result<u64> {
    let error = |allowed: &str| Error::Config {
        setting,
        value: format!("`{text}`"),
        allowed: format!("{allowed} (bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB)"),
    };
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, suffix) = text.split_at(digits);
    if number.is_empty() {
        return Err(error("a size begins with a digit"));
    }
    let unit = UNITS
        .iter()
        .find(|(name, _)| *name == suffix)
        .map(|(_, bytes)| *bytes)
        .ok_or_else(|| error("this unit is not known"))?;
    number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(unit))
        .ok_or_else(|| error("a size is less than 2^64 bytes"))
}

/// Writes a size with the largest unit that divides it, so that [`parse_bytes`] gives it back exactly.
pub fn format_bytes(bytes: u64) -> String {
    let fits = |&&(name, unit): &&(&str, u64)| {
        !name.is_empty() && name != "B" && bytes >= unit && bytes.is_multiple_of(unit)
    };
    match UNITS.iter().find(fits) {
        Some((name, unit)) => format!("{}{name}", bytes / unit),
        None => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn units_mean_what_they_say() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("7B", 7),
            ("400MB", 400_000_000),
            ("16MiB", 16 << 20),
            ("8GiB", 8 << 30),
            ("1TB", 1_000_000_000_000),
            ("2kB", 2000),
            ("2KB", 2000),
            ("2KiB", 2048),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_bytes("s", text).unwrap(), bytes, "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused_with_a_reason() {
        for text in [
            "", " ", "-1", "+1", "1.5GiB", "8gb", "8G", "8 GiB", " 8GiB", "8GiB ", "33554432abc", "0x10",
            "18446744073709551616", "99999999999TiB", "１",
        ] {
            match parse_bytes("capacity", text) {
                Err(Error::Config { setting: "capacity", value, allowed }) => {
                    assert!(value.contains(text) && allowed.contains("GiB"));
                }
                other => panic!("{text:?}: {other:?}"),
            }
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(bytes in any::<u64>(), shift in 0u32..64) {
            let bytes = bytes >> shift << (shift / 2);
            prop_assert_eq!(parse_bytes("s", &format_bytes(bytes)).unwrap(), bytes);
        }

        #[test]
        fn arbitrary_text_never_panics(text in ".*") {
            let _ = parse_bytes("s", &text);
        }
    }
}
