//! Where a configuration comes from: defaults, a TOML file, the environment, upstream's variables.

use super::settings::SETTINGS;
use super::{Config, config_error};
use crate::Result;
use crate::namespace::mode::of_namespace;
use crate::namespace::{NamespaceMode, NamespaceSettings};
use crate::size::parse_bytes;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Name of the tables in a file that namespaces with settings of their own have. They are not in the environment: names
/// may contain anything.
const NAMESPACES: &str = "namespaces";

/// A configuration and where each of its values came from.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The configuration, checked as a whole.
    pub config: Config,
    /// Every setting, in the order of the table in README.
    pub settings: Vec<SettingValue>,
}

/// One setting as it was loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SettingValue {
    /// Name of the setting.
    pub name: &'static str,
    /// Its value, as a file or the environment would say it.
    pub value: String,
    /// Where the value came from.
    pub source: Source,
}

/// Where a value came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Nobody said anything.
    Default,
    /// The file.
    File,
    /// This variable of the environment.
    Environment(&'static str),
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Source::Default => f.write_str("default"),
            Source::File => f.write_str("file"),
            Source::Environment(variable) => f.write_str(variable),
        }
    }
}

impl Config {
    /// The configuration that the environment asks for, with the file that `HOTSLICE_CONFIG` names behind it; `None`
    /// if they ask for no cache.
    ///
    /// See the table in README for the variables. Resolves host names, which may block.
    pub fn from_env() -> Result<Option<Self>> {
        Ok(Self::load(None)?.map(|loaded| loaded.config))
    }

    /// [`Config::from_env`] with this file instead of the one that `HOTSLICE_CONFIG` names, and with the sources.
    ///
    /// The file is TOML: one key per setting, named as the field; sizes as numbers of bytes or as texts with a unit;
    /// lists as arrays or as texts with commas; a table `[namespaces."name"]` for each namespace with settings of its
    /// own (`mode`, `ttl_ms`, `validate_ms`, `quota_bytes`). A key that is no setting is an error.
    pub fn load(file: Option<&Path>) -> Result<Option<Loaded>> {
        let variable = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        let named = variable("HOTSLICE_CONFIG").map(std::path::PathBuf::from);
        let text = match file.or(named.as_deref()) {
            None => String::new(),
            Some(path) => std::fs::read_to_string(path).map_err(|error| {
                config_error("configuration file", path.display(), format!("a file that can be read ({error})"))
            })?,
        };
        Self::from_sources(&text, &variable)
    }

    /// [`Config::load`] over the text of a file and any source of variables.
    pub fn from_sources(file: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Loaded>> {
        let (file, namespaces) = parse_file(file)?;
        let upstreams = match variable("HOTSLICE_CAPACITY_BYTES").is_none() && !file.contains_key("capacity_bytes") {
            true => match upstream(variable) {
                Some(upstreams) => Some(upstreams),
                None => return Ok(None),
            },
            false => None,
        };
        let (mut config, mut sources) = (Config::new(0), vec![Source::Default; SETTINGS.len()]);
        if let Some((upstreams, capacity, block)) = upstreams {
            config = upstreams;
            for (setting, source) in SETTINGS.iter().zip(&mut sources) {
                *source = match (setting.name, block) {
                    ("capacity_bytes", _) => Source::Environment(capacity),
                    ("block_bytes", Some(block)) => Source::Environment(block),
                    _ => Source::Default,
                };
            }
        }
        for (setting, source) in SETTINGS.iter().zip(&mut sources) {
            if let Some(value) = variable(setting.variable) {
                (setting.apply)(&mut config, setting.variable, &value)?;
                *source = Source::Environment(setting.variable);
            } else if let Some(value) = file.get(setting.name) {
                (setting.apply)(&mut config, setting.name, value)?;
                *source = Source::File;
            }
        }
        config.namespaces = namespaces;
        config.check()?;
        let value = |(setting, source): (&super::settings::Setting, Source)| SettingValue {
            name: setting.name,
            value: (setting.show)(&config),
            source,
        };
        let mut settings: Vec<SettingValue> = SETTINGS.iter().zip(sources).map(value).collect();
        let each = config.namespaces.iter().map(|(name, settings)| format!("{name:?} {settings}"));
        let value = each.collect::<Vec<_>>().join(", ");
        if !config.namespaces.is_empty() {
            settings.push(SettingValue { name: NAMESPACES, value, source: Source::File });
        }
        Ok(Some(Loaded { config, settings }))
    }
}

/// The file's keys and their values as texts, and the settings of namespaces.
fn parse_file(text: &str) -> Result<(HashMap<String, String>, BTreeMap<String, NamespaceSettings>)> {
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        config_error("configuration file", error.message(), "TOML, one `setting = value` per line")
    })?;
    let (mut settings, mut namespaces) = (HashMap::new(), BTreeMap::new());
    for (key, value) in table {
        if key == NAMESPACES {
            let toml::Value::Table(tables) = value else {
                return Err(config_error(NAMESPACES, value.type_str(), "tables: `[namespaces.\"name\"]` and settings below it"));
            };
            for (name, value) in tables {
                let parsed = parse_namespace(value).map_err(|error| of_namespace(error, &name))?;
                namespaces.insert(name, parsed);
            }
            continue;
        }
        if !SETTINGS.iter().any(|setting| setting.name == key) {
            let names: Vec<&str> = SETTINGS.iter().map(|setting| setting.name).chain([NAMESPACES]).collect();
            return Err(config_error("configuration file", key, format!("one of {}", names.join(", "))));
        }
        let Some(text) = text_of(&value) else {
            return Err(config_error("configuration file", key, "a text, a whole number, or an array of them"));
        };
        settings.insert(key, text);
    }
    Ok((settings, namespaces))
}

/// The table of one namespace.
fn parse_namespace(value: toml::Value) -> Result<NamespaceSettings> {
    const ALLOWED: &str = "a table with mode, ttl_ms, validate_ms and quota_bytes";
    let toml::Value::Table(table) = value else { return Err(config_error(NAMESPACES, value.type_str(), ALLOWED)) };
    let (mut mode, mut ttl_ms, mut validate_ms, mut quota_bytes) = (None, None, None, 0);
    for (key, value) in table {
        let Some(text) = text_of(&value) else {
            return Err(config_error(NAMESPACES, key, "a text or a whole number"));
        };
        let ms = |name| text.parse().map_err(|_| config_error(name, &text, "milliseconds, a whole number"));
        match key.as_str() {
            "mode" => mode = Some(text),
            "ttl_ms" => ttl_ms = Some(ms("ttl_ms")?),
            "validate_ms" => validate_ms = Some(ms("validate_ms")?),
            "quota_bytes" => quota_bytes = parse_bytes("quota_bytes", &text)?,
            _ => return Err(config_error(NAMESPACES, key, ALLOWED)),
        }
    }
    let mode = NamespaceMode::named(mode.as_deref().unwrap_or("immutable"), ttl_ms, validate_ms)?;
    Ok(NamespaceSettings { mode, quota_bytes })
}

fn text_of(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Array(items) => {
            let texts: Option<Vec<String>> = items.iter().map(text_of).collect();
            texts.map(|texts| texts.join(","))
        }
        _ => None,
    }
}

/// What upstream's variables ask for, and which of them said so. `None`: no cache.
fn upstream(variable: &dyn Fn(&str) -> Option<String>) -> Option<(Config, &'static str, Option<&'static str>)> {
    let first = |names: &[&'static str]| names.iter().find_map(|&name| Some((name, variable(name)?)));
    let (name, value) = first(&["MC_STORE_LOCAL_HOT_CACHE_SIZE", "LOCAL_HOT_CACHE_SIZE"])?;
    let block = first(&["MC_STORE_LOCAL_HOT_BLOCK_SIZE", "LOCAL_HOT_BLOCK_SIZE"]);
    let read = || {
        let mut config = Config::new(parse_bytes(name, &value)?);
        if let Some((name, value)) = &block {
            config.block_bytes = usable_block(parse_bytes(name, value)?);
        }
        config.check()?;
        Ok::<Config, crate::Error>(config)
    };
    match read() {
        Ok(config) => Some((config, name, block.map(|(name, _)| name))),
        Err(error) => {
            tracing::warn!(%error, "the hot cache is off: upstream's variable is invalid");
            None
        }
    }
}

/// Upstream allows any block size; here a block is a power of two and at least a hugepage.
fn usable_block(bytes: u64) -> u64 {
    let usable = bytes.clamp(2 << 20, 1 << 30).next_power_of_two();
    if usable != bytes {
        tracing::warn!(asked = bytes, used = usable, "block size rounded up to a power of two");
    }
    usable
}
