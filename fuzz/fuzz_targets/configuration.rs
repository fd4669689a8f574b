//! Any values of the variables: a configuration within its limits, none, or an error that names a setting.
#![no_main]

use hotslice::{Config, Error};
use libfuzzer_sys::fuzz_target;

const NAMES: [&str; 8] = [
    "HOTSLICE_CAPACITY_BYTES",
    "HOTSLICE_BLOCK_BYTES",
    "HOTSLICE_SHARDS",
    "HOTSLICE_CORES",
    "HOTSLICE_PAGES",
    "HOTSLICE_POLICY",
    "MC_STORE_LOCAL_HOT_CACHE_SIZE",
    "LOCAL_HOT_BLOCK_SIZE",
];

fuzz_target!(|text: &str| {
    let values: Vec<&str> = text.split('\n').collect();
    let get = |name: &str| {
        let at = NAMES.iter().position(|known| *known == name)?;
        values.get(at).filter(|value| !value.is_empty()).map(|value| (*value).to_owned())
    };
    // Lines beyond the variables are a file.
    let file = values.get(NAMES.len()..).unwrap_or(&[]).join("\n");
    match Config::from_sources(&file, &get) {
        Ok(Some(loaded)) => loaded.config.check().expect("what was accepted is within its limits"),
        Ok(None) => {}
        Err(Error::Config { setting, allowed, .. }) => assert!(!setting.is_empty() && !allowed.is_empty()),
        Err(error) => panic!("{error}"),
    }
});
