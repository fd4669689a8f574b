//! Promise 9: misconfiguration is an error that names the setting, the value and what is allowed.

use hotslice::memory::MemoryError;
use hotslice::{Cache, Config, Error};
use hotslice_tests::gauges::alone;
use hotslice_tests::setup::{MIB, config};
use std::os::unix::fs::PermissionsExt;

fn from_env(pairs: &[(&str, &str)]) -> Result<Option<Config>, Error> {
    let find = |name: &str| pairs.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
    Ok(Config::from_sources("", &find)?.map(|loaded| loaded.config))
}

#[test]
fn sizes_that_are_none_are_refused_by_name() {
    for bad in [
        "",
        " ",
        "0",
        "-1",
        "-8GiB",
        "+1GiB",
        "garbage",
        "1.0000000001GiB",
        "8 GiB",
        "8gib",
        "64MiB ",
        "64MiBx",
        "0x100000",
        "1e9",
        "NaN",
        "18446744073709551616",
        "99999999999TiB",
        "1",
        "4095",
        "1MiB",
    ] {
        match from_env(&[("HOTSLICE_CAPACITY_BYTES", bad)]) {
            Err(Error::Config { setting, value, allowed }) => {
                assert!(setting.to_lowercase().contains("capacity_bytes"), "{setting}");
                assert!(!allowed.is_empty() && !value.is_empty(), "{bad:?}: {value:?} {allowed:?}");
            }
            other => panic!("{bad:?}: {other:?}"),
        }
    }
}

#[test]
fn the_message_says_what_was_given_and_what_is_allowed() {
    let error = from_env(&[("HOTSLICE_CAPACITY_BYTES", "12parsecs")]).unwrap_err().to_string();
    for word in ["HOTSLICE_CAPACITY_BYTES", "12parsecs", "GiB"] {
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn other_settings_are_checked_too() {
    for (name, bad) in [
        ("HOTSLICE_SHARDS", "0"),
        ("HOTSLICE_SHARDS", "257"),
        ("HOTSLICE_SHARDS", "-1"),
        ("HOTSLICE_LANES_PER_PEER", "0"),
        ("HOTSLICE_LANE_DEPTH", "1025"),
        ("HOTSLICE_RECEIVE_BYTES", "1KiB"),
        ("HOTSLICE_RECEIVE_TIMEOUT_MS", "0"),
        ("HOTSLICE_REQUEST_RING", "1"),
        ("HOTSLICE_POLICY", "random"),
        ("HOTSLICE_ADMISSION", "sometimes"),
        ("HOTSLICE_PAGES", ""),
        ("HOTSLICE_LOCK", "yes"),
        ("HOTSLICE_ORIGIN", ""),
        ("HOTSLICE_ORIGIN", "127.0.0.1"),
        ("HOTSLICE_ORIGIN", "127.0.0.1:99999"),
        ("HOTSLICE_CORES", "0,x"),
    ] {
        match from_env(&[("HOTSLICE_CAPACITY_BYTES", "1GiB"), (name, bad)]) {
            Err(Error::Config { setting, allowed, .. }) => {
                let field = name.trim_start_matches("HOTSLICE_").to_lowercase();
                assert!(setting.to_lowercase().contains(&field), "{name}={bad}: {setting}");
                assert!(!allowed.is_empty(), "{name}={bad}");
            }
            other => panic!("{name}={bad}: {other:?}"),
        }
    }
}

#[test]
fn upstreams_variables_work_and_their_invalid_values_switch_the_cache_off() {
    let on =
        from_env(&[("LOCAL_HOT_CACHE_SIZE", "400MB"), ("LOCAL_HOT_BLOCK_SIZE", "4194304")]).unwrap().unwrap();
    assert_eq!((on.capacity_bytes, on.block_bytes), (400_000_000, 4 << 20));
    for bad in ["0", "-1", "garbage", "", "15"] {
        assert!(from_env(&[("LOCAL_HOT_CACHE_SIZE", bad)]).unwrap().is_none(), "{bad:?}");
        assert!(from_env(&[("MC_STORE_LOCAL_HOT_CACHE_SIZE", bad)]).unwrap().is_none(), "{bad:?}");
    }
    assert!(from_env(&[]).unwrap().is_none());
}

#[test]
fn a_cache_does_not_open_with_a_bad_configuration_and_leaves_nothing_behind() {
    type Spoil = fn(&mut Config);
    let cases: [(&str, Spoil); 6] = [
        ("capacity_bytes", |c| c.capacity_bytes = 0),
        ("capacity_bytes", |c| c.capacity_bytes = c.block_bytes - 1),
        ("capacity_bytes", |c| c.shards = 5),
        ("shards", |c| c.shards = 0),
        ("cores", |c| c.cores = vec![0, 1, 2]),
        ("cores", |c| c.cores = vec![1_000]),
    ];
    for (name, spoil) in cases {
        alone(|| {
            let mut config = config(4 * MIB, &[]);
            spoil(&mut config);
            match Cache::open(config) {
                Err(Error::Config { setting, .. }) => assert_eq!(setting, name),
                other => panic!("{name}: {other:?}"),
            }
        });
    }
}

#[test]
fn blocks_have_a_size_that_memory_can_have() {
    for bad in [0, 1, 4096, MIB as u64 + 1, 3 << 20, (32 << 10), (2 << 30)] {
        alone(|| {
            let mut config = config(0, &[]);
            config.capacity_bytes = 8 << 30;
            config.block_bytes = bad;
            match Cache::open(config) {
                Err(Error::Config { setting: "block_bytes", .. }) => {}
                Err(Error::Memory(error))
                    if matches!(*error, MemoryError::Config { setting: "block_bytes", .. }) => {}
                other => panic!("{bad}: {other:?}"),
            }
        });
    }
}

#[test]
fn more_entries_than_there_is_room_for_cost_nothing() {
    alone(|| {
        let mut config = config(MIB, &[]);
        config.entries_max = 1_000_000_000;
        let cache = Cache::open(config).expect("as many as there are granules");
        assert_eq!(cache.reports()[0].slots, 256);
    });
}

#[test]
fn pauses_and_ports_that_make_no_sense_are_refused() {
    let mut pauses = config(MIB, &[]);
    (pauses.backoff_min_ms, pauses.backoff_max_ms) = (100, 10);
    let error = Cache::open(pauses).expect_err("refused").to_string();
    assert!(error.contains("backoff_max_ms") && error.contains("100"), "{error}");
    let port = config(MIB, &[([127, 0, 0, 1], 0).into()]);
    let error = Cache::open(port).expect_err("refused").to_string();
    assert!(error.contains("origin") && error.contains("port"), "{error}");
}

#[test]
fn a_secret_that_cannot_be_used_fails_the_start() {
    alone(|| {
        let path = std::env::temp_dir().join(format!("hotslice-it-secret-{}", std::process::id()));
        let opened = || {
            let mut config = config(MIB, &[]);
            config.secret_file = Some(path.clone());
            Cache::open(config).map_err(|error| error.to_string())
        };
        let error = opened().expect_err("there is no file");
        assert!(error.contains("secret_file") && error.contains("can be read"), "{error}");
        std::fs::write(&path, "short").expect("a temporary file");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("its owner");
        let error = opened().expect_err("too short");
        assert!(error.contains("5 bytes: 16 to 4096"), "{error}");
        std::fs::write(&path, "a secret of the right length").expect("a temporary file");
        drop(opened().expect("a good secret that nobody asks for"));
        std::fs::remove_file(&path).expect("it is there");
    });
}
