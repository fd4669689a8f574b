//! Any 64 bytes to the shard's decoder of answers: an error, or a header that keeps its promises and
//! encodes to the same bytes.
#![no_main]

use hotslice::wire::{RESPONSE_HEADER_BYTES, ResponseHeader};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((bytes, _)) = data.split_first_chunk::<RESPONSE_HEADER_BYTES>() else { return };
    // A fuzzer cannot guess checksums: try the bytes as they are, and with their checksum put right.
    let mut mended = *bytes;
    let checksum = hotslice::checksum::crc32c(&mended[..RESPONSE_HEADER_BYTES - 4]);
    mended[RESPONSE_HEADER_BYTES - 4..].copy_from_slice(&checksum.to_le_bytes());
    for bytes in [*bytes, mended] {
        if let Ok(header) = ResponseHeader::decode(&bytes) {
            let mut again = [0; RESPONSE_HEADER_BYTES];
            header.encode_into(&mut again);
            assert_eq!(again, bytes);
        }
    }
});
