//! Any bytes at all, in pieces of any size, to the server's decoder. It must end, not panic, and not keep
//! more than a small body.
#![no_main]

use hotslice::wire::{Limits, RequestDecoder};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&piece, stream)) = data.split_first() else { return };
    let mut decoder = RequestDecoder::new(Limits::default());
    for mut input in stream.chunks(usize::from(piece).max(1)) {
        loop {
            match decoder.next(&mut input) {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) if error.framing_lost => return,
                Err(_) => {}
            }
        }
    }
});
