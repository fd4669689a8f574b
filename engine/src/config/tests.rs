//! Reading settings, and what is refused.

#![allow(clippy::unwrap_used)]

use super::*;
use std::collections::HashMap;

fn load(file: &str, pairs: &[(&str, &str)]) -> Result<Option<Loaded>> {
    let map: HashMap<_, _> = pairs.iter().map(|&(k, v)| (k.to_owned(), v.to_owned())).collect();
    Config::from_sources(file, &|name| map.get(name).cloned())
}

fn from(pairs: &[(&str, &str)]) -> Result<Option<Config>> {
    Ok(load("", pairs)?.map(|loaded| loaded.config))
}

#[test]
fn nothing_set_means_no_cache() {
    assert!(from(&[]).unwrap().is_none());
}

#[test]
fn every_variable_is_read() {
    let c = from(&[
        ("HOTSLICE_CAPACITY_BYTES", "1GiB"),
        ("HOTSLICE_CAPACITY_MAX_BYTES", "2GiB"),
        ("HOTSLICE_BLOCK_BYTES", "32MiB"),
        ("HOTSLICE_PAGES", "off"),
        ("HOTSLICE_LOCK", "required"),
        ("HOTSLICE_REGISTER", "off"),
        ("HOTSLICE_NUMA", "off"),
        ("HOTSLICE_SHARDS", "2"),
        ("HOTSLICE_CORES", "0, 1"),
        ("HOTSLICE_POLICY", "lru"),
        ("HOTSLICE_ADMISSION", "off"),
        ("HOTSLICE_ENTRIES_MAX", "1000"),
        ("HOTSLICE_ORIGIN", "127.0.0.1:7110,[::1]:7111, unix:/run/hotslice.sock"),
        ("HOTSLICE_SECRET_FILE", "/etc/hotslice secret"),
        ("HOTSLICE_LANES_PER_PEER", "3"),
        ("HOTSLICE_LANE_DEPTH", "4"),
        ("HOTSLICE_RECEIVE_BYTES", "2MiB"),
        ("HOTSLICE_CONNECT_TIMEOUT_MS", "1"),
        ("HOTSLICE_RECEIVE_TIMEOUT_MS", "2"),
        ("HOTSLICE_FILL_TIMEOUT_MS", "3"),
        ("HOTSLICE_BACKOFF_MIN_MS", "4"),
        ("HOTSLICE_BACKOFF_MAX_MS", "5"),
        ("HOTSLICE_REQUEST_RING", "6"),
        ("HOTSLICE_SPIN_US", "7"),
    ])
    .unwrap()
    .unwrap();
    assert_eq!((c.capacity_bytes, c.block_bytes, c.shards), (1 << 30, 32 << 20, 2));
    assert_eq!((c.capacity_max_bytes, c.numa), (2 << 30, crate::memory::NumaPolicy::Off));
    assert_eq!((c.cores.as_slice(), c.entries_max, c.origin.len()), (&[0, 1][..], 1000, 3));
    assert_eq!(c.origin[2], Address::unix("/run/hotslice.sock").unwrap());
    assert_eq!(c.secret_file, Some("/etc/hotslice secret".into()));
    assert_eq!((c.lanes_per_peer, c.lane_depth, c.receive_bytes), (3, 4, 2 << 20));
    assert_eq!((c.connect_timeout_ms, c.receive_timeout_ms, c.fill_timeout_ms), (1, 2, 3));
    assert_eq!((c.backoff_min_ms, c.backoff_max_ms, c.request_ring, c.spin_us), (4, 5, 6, 7));
    assert_eq!((c.pages, c.lock, c.register), (PagePolicy::Off, LockPolicy::Required, LockPolicy::Off));
    assert_eq!((c.policy, c.admission), (PolicyKind::Clock, Admission::Off));
}

#[test]
fn errors_name_setting_value_and_what_is_allowed() {
    for (name, value) in [
        ("HOTSLICE_CAPACITY_BYTES", "0"),
        ("HOTSLICE_CAPACITY_BYTES", "-1"),
        ("HOTSLICE_CAPACITY_BYTES", "garbage"),
        ("HOTSLICE_CAPACITY_BYTES", "1MiB"),
        ("HOTSLICE_CAPACITY_MAX_BYTES", "63MiB"),
        ("HOTSLICE_NUMA", "remote"),
        ("HOTSLICE_SHARDS", "0"),
        ("HOTSLICE_SHARDS", "1x"),
        ("HOTSLICE_PAGES", "maybe"),
        ("HOTSLICE_ORIGIN", "no port"),
        ("HOTSLICE_ORIGIN", "127.0.0.1:0"),
        ("HOTSLICE_ORIGIN", "unix:relative"),
        ("HOTSLICE_RECEIVE_BYTES", "1"),
        ("HOTSLICE_CORES", "0,1"),
    ] {
        let mut pairs = vec![("HOTSLICE_CAPACITY_BYTES", "64MiB")];
        pairs.retain(|(n, _)| *n != name);
        pairs.push((name, value));
        match from(&pairs) {
            Err(Error::Config { allowed, .. }) => assert!(!allowed.is_empty()),
            other => panic!("{name}={value}: {other:?}"),
        }
    }
}

#[test]
fn upstreams_variables_work() {
    for name in ["MC_STORE_LOCAL_HOT_CACHE_SIZE", "LOCAL_HOT_CACHE_SIZE"] {
        let c = from(&[(name, "419430400")]).unwrap().unwrap();
        assert_eq!((c.capacity_bytes, c.block_bytes), (419_430_400, 16 << 20));
    }
    let c = from(&[("LOCAL_HOT_CACHE_SIZE", "419430400"), ("LOCAL_HOT_BLOCK_SIZE", "33554432")]);
    assert_eq!(c.unwrap().unwrap().block_bytes, 32 << 20);
}

#[test]
fn upstreams_invalid_values_switch_the_cache_off() {
    for value in ["0", "-1", "", "abc", "8gb ", "1000", "99999999999999999999999"] {
        assert!(from(&[("MC_STORE_LOCAL_HOT_CACHE_SIZE", value)]).unwrap().is_none(), "{value:?}");
    }
}

#[test]
fn the_environment_goes_before_the_file_and_the_file_before_defaults() {
    let file = r#"
        capacity_bytes = "1GiB"      # a size with a unit
        receive_bytes = 2097152      # or in bytes
        shards = 2
        cores = [0, 1]
        origin = ["127.0.0.1:1", "127.0.0.1:2"]
        transport = "epoll"
    "#;
    let loaded = load(file, &[("HOTSLICE_SHARDS", "1"), ("HOTSLICE_CORES", "")]).unwrap().unwrap();
    let c = &loaded.config;
    assert_eq!((c.capacity_bytes, c.receive_bytes, c.shards, c.origin.len()), (1 << 30, 2 << 20, 1, 2));
    assert_eq!((c.transport, c.cores.len()), (TransportKind::Epoll, 0));
    let source = |name: &str| loaded.settings.iter().find(|setting| setting.name == name).unwrap().source;
    assert_eq!(source("capacity_bytes"), Source::File);
    assert_eq!(source("shards"), Source::Environment("HOTSLICE_SHARDS"));
    assert_eq!(source("policy"), Source::Default);
    let upstream = load("", &[("LOCAL_HOT_CACHE_SIZE", "419430400")]).unwrap().unwrap();
    assert_eq!(upstream.settings[0].source, Source::Environment("LOCAL_HOT_CACHE_SIZE"));
}

#[test]
fn what_is_shown_can_be_read_again() {
    let mut config = Config::new(3 << 30);
    (config.origin, config.cores) = (vec!["127.0.0.1:7110".parse().unwrap(), "unix:/a b".parse().unwrap()], vec![0, 1]);
    config.secret_file = Some("/run/secret".into());
    (config.shards, config.transport) = (2, TransportKind::IoUring);
    let shown: Vec<(&str, String)> =
        settings::SETTINGS.iter().map(|setting| (setting.name, (setting.show)(&config))).collect();
    let file: String = shown.iter().map(|(name, value)| format!("{name} = '{value}'\n")).collect();
    let loaded = load(&file, &[]).unwrap().unwrap();
    let again: Vec<(&str, String)> =
        loaded.settings.iter().map(|setting| (setting.name, setting.value.clone())).collect();
    assert_eq!(again, shown);
    assert!(loaded.settings.iter().all(|setting| setting.source == Source::File));
}

#[test]
fn files_that_are_wrong_are_refused_with_the_reason() {
    for (file, word) in [
        ("capacity_bytes = \"1GiB\"\nshard = 2", "shards"),
        ("capacity_bytes = ", "TOML"),
        ("capacity_bytes = 1.5", "whole number"),
        ("capacity_bytes = \"1GiB\"\nshards = -1", "1 to 256"),
        ("[cache]\ncapacity_bytes = 1", "one of"),
    ] {
        match load(file, &[]) {
            Err(error @ Error::Config { .. }) => assert!(error.to_string().contains(word), "{error}"),
            other => panic!("{file}: {other:?}"),
        }
    }
    assert!(load("shards = 2", &[]).unwrap().is_none(), "no capacity: no cache is asked for");
}

#[test]
fn namespaces_have_tables_in_the_file() {
    let file = r#"
        capacity_bytes = "1GiB"
        namespace_mode = "validate:250"
        [namespaces."tenant a"]
        mode = "ttl"
        ttl_ms = 5000
        quota_bytes = "2GiB"
        [namespaces.b]
        quota_bytes = 0
    "#;
    let loaded = load(file, &[]).unwrap().unwrap();
    let c = &loaded.config;
    assert_eq!(c.namespace_mode, NamespaceMode::Validate { validate_ms: 250 });
    let tenant = NamespaceSettings { mode: NamespaceMode::Ttl { ttl_ms: 5000 }, quota_bytes: 2 << 30 };
    assert_eq!(c.namespaces["tenant a"], tenant);
    assert_eq!(c.namespaces["b"], NamespaceSettings::default());
    let shown = loaded.settings.iter().find(|setting| setting.name == "namespaces").unwrap();
    assert_eq!((shown.value.as_str(), shown.source), (r#""b" immutable, "tenant a" ttl:5000 quota 2GiB"#, Source::File));
}

#[test]
fn namespaces_that_are_wrong_are_refused_by_name() {
    for (lines, words) in [
        ("mode = \"ttl\"", ["ttl_ms", "`x`"]),
        ("mode = \"ttl\"\nttl_ms = 0", ["ttl_ms", "`x`"]),
        ("mode = \"validate\"\nvalidate_ms = -1", ["validate_ms", "-1"]),
        ("mode = \"mutable\"", ["mode", "mutable"]),
        ("quota_bytes = \"1 GB\"", ["quota_bytes", "`x`"]),
        ("quota = 1", ["quota", "quota_bytes"]),
    ] {
        let file = format!("capacity_bytes = \"1GiB\"\n[namespaces.x]\n{lines}");
        let error = load(&file, &[]).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{lines}: {error}");
    }
    let error = load("capacity_bytes = \"1GiB\"\nnamespaces = 1", &[]).unwrap_err().to_string();
    assert!(error.contains("namespaces"), "{error}");
    let error = load("capacity_bytes = \"1GiB\"\nnamespace_mode = \"ttl:0\"", &[]).unwrap_err().to_string();
    assert!(error.contains("ttl_ms"), "{error}");
}

#[test]
fn the_builder_sets_and_checks() {
    let ttl = NamespaceSettings { mode: NamespaceMode::Ttl { ttl_ms: 1 }, quota_bytes: 0 };
    let builder = Config::builder(64 << 20).shards(2).namespace("n", ttl).secret_file("/s").absent_ttl_ms(7);
    let c = builder.clone().build().unwrap();
    assert_eq!((c.shards, c.namespaces["n"], c.absent_ttl_ms), (2, ttl, 7));
    assert_eq!(c.secret_file, Some("/s".into()));
    let error = builder.shards(0).build().unwrap_err().to_string();
    assert!(error.contains("shards"), "{error}");
    let never = NamespaceSettings { mode: NamespaceMode::Ttl { ttl_ms: 0 }, quota_bytes: 0 };
    let error = Config::builder(64 << 20).namespace("n", never).build().unwrap_err().to_string();
    assert!(error.contains("ttl_ms") && error.contains("`n`"), "{error}");
}
