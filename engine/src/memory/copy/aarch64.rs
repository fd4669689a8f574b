//! Copies on AArch64: pairs of vector registers with the non-temporal hint.
//!
//! `ldnp` and `stnp` tell the processor that the data will not be used again soon; how far it follows is up
//! to the implementation. Stores with the hint are ordered like plain stores. Loads with it have one
//! weakness: an address dependency does not order them after the load the address came from. Callers here
//! hold the source by an acquire operation (a pin), which does, so nothing is to be added.

use std::arch::asm;
use std::ptr;

/// Bytes per round: two pairs of 16-byte registers.
const STEP: usize = 64;

/// Copies with `ldnp` and `stnp`.
///
/// # Safety
///
/// As for [`ptr::copy_nonoverlapping`].
pub(super) unsafe fn pair_stream(dst: *mut u8, src: *const u8, len: usize) {
    let head = (dst.addr().wrapping_neg() & 15).min(len);
    let rounds = (len - head) / STEP;
    // SAFETY: `head + rounds * STEP` is at most `len`, so every access lies in what the caller vouches for. Vector
    // loads and stores to ordinary memory need no alignment; the head only makes the stores faster. The
    // loop is entered with at least one round and clobbers only the registers that are named.
    unsafe {
        ptr::copy_nonoverlapping(src, dst, head);
        let mut from = src.add(head);
        let mut to = dst.add(head);
        if rounds > 0 {
            asm!(
                "2:",
                "ldnp {a:q}, {b:q}, [{from}]",
                "ldnp {c:q}, {d:q}, [{from}, #32]",
                "add {from}, {from}, #64",
                "stnp {a:q}, {b:q}, [{to}]",
                "stnp {c:q}, {d:q}, [{to}, #32]",
                "add {to}, {to}, #64",
                "subs {rounds}, {rounds}, #1",
                "b.ne 2b",
                a = out(vreg) _,
                b = out(vreg) _,
                c = out(vreg) _,
                d = out(vreg) _,
                from = inout(reg) from,
                to = inout(reg) to,
                rounds = inout(reg) rounds => _,
                options(nostack),
            );
        }
        ptr::copy_nonoverlapping(from, to, len - head - (len - head) / STEP * STEP);
    }
}
