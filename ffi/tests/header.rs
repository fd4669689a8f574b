//! The header in the repository is what cbindgen makes of the library.

use std::path::Path;

/// `HOTSLICE_UPDATE=1 cargo test -p hotslice-ffi --test header` writes it anew.
#[test]
fn the_header_is_up_to_date() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = here.join("include/hotslice.h");
    let mut made = Vec::new();
    cbindgen::generate(here).expect("cbindgen reads the library").write(&mut made);
    let made = String::from_utf8(made).unwrap();
    if std::env::var_os("HOTSLICE_UPDATE").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap();
    let differing = made.lines().zip(kept.lines()).position(|(made, kept)| made != kept);
    assert!(
        made == kept,
        "include/hotslice.h differs from the library, first in line {}; run this test with HOTSLICE_UPDATE=1",
        differing.map_or(made.lines().count().min(kept.lines().count()), |line| line) + 1
    );
}
