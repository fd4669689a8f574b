//! Sizes in bytes as people write them: in settings, on the command line, in reports.
//!
//! It knows nothing of which settings there are; ranges are checked by whoever owns the setting.

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
    // The first of the two is the one that is written.
    ("kB", 1_000),
    ("KB", 1_000),
    ("B", 1),
    ("", 1),
];

/// Digits after the point that are read; what is finer cannot be a whole byte of any size people write.
const FRACTION_DIGITS_MAX: usize = 18;
const TOO_LARGE: &str = "a size is less than 2^64 bytes";
/// Characters of a refused text that its error repeats.
const SHOWN_CHARS_MAX: usize = 64;

/// Parses a size: a number, then nothing or one of `B`, `kB`, `KB`, `MB`, `GB`, `TB` (powers of 1000), `KiB`,
/// `MiB`, `GiB`, `TiB` (powers of 1024).
///
/// The whole string counts: no sign, no spaces, nothing after the unit. A fraction is taken if it comes to
/// whole bytes (`1.5GiB`), because then nothing is rounded; `0.3KiB` is refused. Letters alone (`8G`) are
/// refused, because they mean 1000 to some and 1024 to others.
///
/// # Errors
///
/// [`Error::Config`] with `setting`, the text and what is allowed.
pub fn parse_bytes(setting: &'static str, text: &str) -> Result<u64> {
    parse(text).map_err(|reason| Error::Config {
        setting,
        value: shown(text),
        allowed: format!("{reason} (bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB)"),
    })
}

fn parse(text: &str) -> Result<u64, &'static str> {
    let (whole, rest) = split_digits(text);
    if whole.is_empty() {
        return Err("a size begins with a digit");
    }
    let (fraction, suffix) = match rest.strip_prefix('.') {
        None => ("", rest),
        Some(rest) => match split_digits(rest) {
            ("", _) => return Err("a point is followed by a digit"),
            split => split,
        },
    };
    let (_, unit) = UNITS.iter().find(|(name, _)| *name == suffix).ok_or("this unit is not known")?;
    let whole: u64 = whole.parse().map_err(|_| TOO_LARGE)?;
    let bytes = whole.checked_mul(*unit).ok_or(TOO_LARGE)?;
    bytes.checked_add(fraction_bytes(fraction, *unit)?).ok_or(TOO_LARGE)
}

/// Bytes of the digits after the point, if they are whole.
fn fraction_bytes(digits: &str, unit: u64) -> Result<u64, &'static str> {
    const NOT_WHOLE: &str = "a fraction comes to whole bytes";
    let digits = digits.trim_end_matches('0');
    if digits.is_empty() {
        return Ok(0);
    }
    if digits.len() > FRACTION_DIGITS_MAX {
        return Err(NOT_WHOLE);
    }
    // In 128 bits: 10^18 times a unit of at most 2^40 is less than 2^100.
    let number: u128 = digits.parse().map_err(|_| NOT_WHOLE)?;
    let (scaled, scale) = (number * u128::from(unit), 10u128.pow(digits.len() as u32));
    if scaled % scale != 0 {
        return Err(NOT_WHOLE);
    }
    u64::try_from(scaled / scale).map_err(|_| NOT_WHOLE)
}

fn split_digits(text: &str) -> (&str, &str) {
    text.split_at(text.bytes().take_while(u8::is_ascii_digit).count())
}

/// The text as an error repeats it: control characters escaped, and not all of it if it is long.
fn shown(text: &str) -> String {
    let short: String = text.chars().take(SHOWN_CHARS_MAX).collect();
    let more = if short.len() < text.len() { "…" } else { "" };
    format!("`{}{more}`", short.escape_debug())
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
            ("0018", 18),
            ("1.5GiB", 3 << 29),
            ("0.5KiB", 512),
            ("2.0", 2),
            ("1.048576MB", 1 << 20),
            ("12.500000000000000000000MB", 12_500_000),
            ("18446744073.709551615GB", u64::MAX),
        ] {
            assert_eq!(parse_bytes("s", text).unwrap(), bytes, "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused_with_a_reason() {
        for text in [
            "", " ", "-1", "+1", "0.3KiB", "1.5", ".5GiB", "1.GiB", "1.5.5GiB", "8gb", "8G", "8 GiB", " 8GiB", "8GiB ", "33554432abc", "0x10",
            "18446744073709551616", "99999999999TiB", "18446744073.709551616GB",
            "0.0000000000000000001TB", "1e9", "１", "1.٥GiB",
        ] {
            match parse_bytes("capacity", text) {
                Err(Error::Config { setting: "capacity", value, allowed }) => {
                    assert!(value.contains(text) && allowed.contains("GiB"));
                }
                other => panic!("{text:?}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_refused_text_is_repeated_safely() {
        for (text, want) in [("9\n\u{1b}[2J".to_owned(), r"`9\n\u{1b}[2J`".to_owned()), ("9".repeat(5000), format!("`{}…`", "9".repeat(64)))] {
            let Err(Error::Config { value, .. }) = parse_bytes("s", &text) else { panic!("{text:?} taken") };
            assert_eq!(value, want);
        }
    }

    #[test]
    fn the_largest_unit_that_divides_is_written() {
        for (bytes, text) in [
            (0, "0"), (1, "1"), (1023, "1023"), (1000, "1kB"), (1536, "1536"), (16 << 20, "16MiB"), (1 << 40, "1TiB"),
            (400_000_000, "400MB"), (u64::MAX, "18446744073709551615"),
        ] {
            assert_eq!(format_bytes(bytes), text);
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

        #[test]
        fn almost_a_size_never_panics(text in "[0-9]{0,25}\\.?[0-9]{0,25}[kKMGT]?i?B?") {
            let _ = parse_bytes("s", &text);
        }

        /// Moving the point by three digits is the next smaller decimal unit.
        #[test]
        fn a_fraction_is_exact(whole in 0u64..1_000_000, thousandths in 0u64..1000) {
            let text = format!("{whole}.{thousandths:03}GB");
            prop_assert_eq!(parse_bytes("s", &text).unwrap(), (whole * 1000 + thousandths) * 1_000_000);
        }
    }
}
