//! `hotslice config` as a user meets it.

use std::process::{Command, Output};

fn config(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hotslice"));
    command.arg("config").args(arguments);
    for (name, _) in std::env::vars().filter(|(name, _)| name.contains("HOT")) {
        command.env_remove(name);
    }
    command.envs(variables.iter().copied()).output().expect("the command starts")
}

#[test]
fn tells_values_and_where_they_come_from() {
    let file = std::env::temp_dir().join(format!("hotslice-config-{}.toml", std::process::id()));
    std::fs::write(&file, "capacity_bytes = \"1GiB\"\nshards = 2\n").expect("a file in the temporary folder");
    let path = file.to_str().expect("a path that is text");

    let named = config(&["--json"], &[("HOTSLICE_CONFIG", path), ("HOTSLICE_SHARDS", "3")]);
    let text = String::from_utf8_lossy(&named.stdout);
    let settings: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let setting =
        |name: &str| settings.as_array().and_then(|all| all.iter().find(|one| one["name"] == name)).cloned();
    assert_eq!(setting("capacity_bytes").expect("is listed")["source"], "file");
    let shards = setting("shards").expect("is listed");
    assert_eq!(
        (&shards["value"], &shards["source"]["environment"]),
        (&"3".into(), &"HOTSLICE_SHARDS".into())
    );

    assert_eq!(config(&[], &[]).status.code(), Some(2), "no cache is asked for");
    let refused = config(&["--file", path], &[("HOTSLICE_SHARDS", "none")]);
    assert_eq!(refused.status.code(), Some(1));
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(text.contains("HOTSLICE_SHARDS") && text.contains("1 to 256"), "{text}");
    std::fs::remove_file(&file).expect("it is there");
    assert_eq!(config(&["--file", path], &[]).status.code(), Some(1), "the file is gone");
}
