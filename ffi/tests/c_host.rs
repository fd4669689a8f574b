//! Compiles `smoke.c` against the header and the library, and runs it.

use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn a_c_host_opens_reads_and_misuses_a_cache() {
    // The test's own executable lies in target/PROFILE/deps, the library one folder up or beside it.
    let deps: PathBuf = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let library = [deps.parent().unwrap(), &deps]
        .iter()
        .map(|folder| folder.join("libhotslice_ffi.so"))
        .find(|path| path.exists())
        .expect("cargo builds the library before its tests");
    let folder = library.parent().unwrap();
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = deps.join("hotslice_c_smoke");
    let compiled = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program)
        .arg(here.join("tests/smoke.c"))
        .arg("-I")
        .arg(here.join("include"))
        .arg("-L")
        .arg(folder)
        .args(["-lhotslice_ffi", "-Wl,-rpath"])
        .arg(folder)
        .output()
        .expect("a C compiler named cc");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new(&program).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
}
