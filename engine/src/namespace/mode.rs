//! What a namespace promises about the age of its values, and how much memory they may take: settings, their texts and
//! their limits. What the promises mean to a lookup is the shard's matter.

use crate::config::{config_error, range};
use crate::size::format_bytes;
use crate::{Error, Result};

/// Longest `ttl_ms` and `validate_ms`: thirty days.
const MS_MAX: u64 = 30 * 86_400_000;

/// What bounds the age of a namespace's values where another writer may have changed them at the origin.
///
/// What happens through this cache (put, invalidate) is seen at once in every mode. Leases keep their bytes in every mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NamespaceMode {
    /// Nothing: keys are content hashes, or whoever changes a value invalidates it. A hit is served as it is.
    #[default]
    Immutable,
    /// A value is served for so long after it was published, then it is fetched anew.
    Ttl {
        /// Milliseconds from 1 to thirty days.
        ttl_ms: u64,
    },
    /// A value is served without asking for so long after the origin last confirmed it; then the origin is asked for the
    /// version at the next lookup. The same version is served without a transfer, another one is fetched, and a key
    /// that the origin does not have is absent. Where the origin cannot be asked the lookup fails.
    ///
    /// A value that was put through the cache counts as confirmed when it was put. Asked later, the origin's value goes
    /// before it; where the origin has none, the put value stays. Without an origin there is nobody to ask: as
    /// `Immutable`.
    Validate {
        /// Milliseconds from 0 (asks at every lookup) to thirty days.
        validate_ms: u64,
    },
}

/// Settings of one namespace. See [`Cache::set_namespace`](crate::Cache::set_namespace).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NamespaceSettings {
    /// What bounds the age of its values.
    pub mode: NamespaceMode,
    /// Bytes that its values may take in whole granules of 4 KiB, pinned ones included; 0: no bound of its own. Every
    /// shard allows its equal share of it, in whole granules and at least one.
    pub quota_bytes: u64,
}

impl NamespaceMode {
    /// Checks the limits.
    pub(crate) fn check(self) -> Result<()> {
        match self {
            Self::Immutable => Ok(()),
            Self::Ttl { ttl_ms } => range("ttl_ms", ttl_ms, 1, MS_MAX),
            Self::Validate { validate_ms } => range("validate_ms", validate_ms, 0, MS_MAX),
        }
    }

    /// A mode by its name in a file, with the milliseconds that were given beside it.
    pub(crate) fn named(name: &str, ttl_ms: Option<u64>, validate_ms: Option<u64>) -> Result<Self> {
        let needless = |setting, ms: Option<u64>| match ms {
            Some(ms) => Err(config_error(setting, ms, format!("left out with mode = \"{name}\""))),
            None => Ok(()),
        };
        let needed = |setting, ms: Option<u64>| {
            ms.ok_or_else(|| config_error(setting, "missing", format!("needed with mode = \"{name}\"")))
        };
        let mode = match name {
            "immutable" => Self::Immutable,
            "ttl" => Self::Ttl { ttl_ms: needed("ttl_ms", ttl_ms)? },
            "validate" => Self::Validate { validate_ms: needed("validate_ms", validate_ms)? },
            _ => return Err(config_error("mode", name, "immutable, ttl or validate")),
        };
        if !matches!(mode, Self::Ttl { .. }) {
            needless("ttl_ms", ttl_ms)?;
        }
        if !matches!(mode, Self::Validate { .. }) {
            needless("validate_ms", validate_ms)?;
        }
        mode.check()?;
        Ok(mode)
    }
}

impl NamespaceSettings {
    /// Checks the limits.
    pub(crate) fn check(&self) -> Result<()> {
        self.mode.check()
    }

    /// [`NamespaceSettings::check`] for a namespace whose name belongs into the error.
    pub(crate) fn check_for(&self, name: &str) -> Result<()> {
        self.check().map_err(|error| of_namespace(error, name))
    }
}

/// Says whose setting it was.
pub(crate) fn of_namespace(error: Error, name: &str) -> Error {
    match error {
        Error::Config { setting, value, allowed } => {
            Error::Config { setting, value, allowed: format!("{allowed} (of namespace `{name}`)") }
        }
        other => other,
    }
}

impl std::fmt::Display for NamespaceMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Immutable => f.write_str("immutable"),
            Self::Ttl { ttl_ms } => write!(f, "ttl:{ttl_ms}"),
            Self::Validate { validate_ms } => write!(f, "validate:{validate_ms}"),
        }
    }
}

impl std::str::FromStr for NamespaceMode {
    type Err = ();

    /// Reads what `Display` writes. The limits are checked with the configuration.
    fn from_str(text: &str) -> std::result::Result<Self, ()> {
        let ms = |text: &str| text.parse().map_err(|_| ());
        match text.split_once(':') {
            None if text == "immutable" => Ok(Self::Immutable),
            Some(("ttl", text)) => Ok(Self::Ttl { ttl_ms: ms(text)? }),
            Some(("validate", text)) => Ok(Self::Validate { validate_ms: ms(text)? }),
            _ => Err(()),
        }
    }
}

impl std::fmt::Display for NamespaceSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.quota_bytes {
            0 => self.mode.fmt(f),
            quota_bytes => write!(f, "{} quota {}", self.mode, format_bytes(quota_bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn modes_are_read_as_they_are_written() {
        for mode in [
            NamespaceMode::Immutable,
            NamespaceMode::Ttl { ttl_ms: 5000 },
            NamespaceMode::Validate { validate_ms: 0 },
        ] {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        for bad in ["", "ttl", "ttl:", "ttl:x", "validate", "immutable:1", "ttl: 5", "Immutable"] {
            assert_eq!(bad.parse::<NamespaceMode>(), Err(()), "{bad}");
        }
    }

    #[test]
    fn what_is_not_allowed_is_named() {
        let error = |name, ttl_ms, validate_ms| {
            NamespaceMode::named(name, ttl_ms, validate_ms).unwrap_err().to_string()
        };
        for (error, word) in [
            (error("ttl", None, None), "ttl_ms"),
            (error("ttl", Some(0), None), "ttl_ms"),
            (error("validate", Some(1), Some(1)), "ttl_ms"),
            (error("validate", None, Some(MS_MAX + 1)), "validate_ms"),
            (error("immutable", None, Some(1)), "validate_ms"),
            (error("mutable", None, None), "`mode`"),
        ] {
            assert!(error.contains(word), "{error}");
        }
        assert_eq!(NamespaceMode::named("ttl", Some(7), None).unwrap(), NamespaceMode::Ttl { ttl_ms: 7 });
    }
}
