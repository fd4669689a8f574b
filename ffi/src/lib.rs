//! C ABI of hotslice: `include/hotslice.h`.
//!
//! The part that a host needs to open a cache and read from it: open, copying read, put, invalidate,
//! counters, close. Every function may be called from any thread; none unwinds into C (a panic becomes
//! `HOTSLICE_PANIC`); outputs are written only on success; a null pointer where one is not allowed is
//! `HOTSLICE_INVALID_ARGUMENT`. The calls that take a deadline block until it at the longest.

use hotslice::memory::MemoryError;
use hotslice::{Cache, Config, Error, Invalidate, Key};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// Version of this interface. Goes up when something that exists changes its meaning.
pub const HOTSLICE_ABI_VERSION: u32 = 1;

/// How a call ended. Spaced, so that kinds can be added beside their like.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HotsliceStatus {
    /// Done.
    Ok = 0,
    /// The origin has no such key. Not an error.
    Absent = 10,
    /// A null pointer, a length or a text that is not allowed.
    InvalidArgument = 20,
    /// The buffer is smaller than the value; the needed length was written.
    BufferTooSmall = 30,
    /// The deadline passed.
    DeadlinePassed = 40,
    /// A peer cannot be reached, refused, or broke the protocol; or the bytes had the wrong checksum.
    Unavailable = 50,
    /// There is no memory for the value: too large, or everything is pinned.
    NoMemory = 60,
    /// The cache was shut down, or belongs to another process.
    Closed = 70,
    /// Something else; see `hotslice_last_error`.
    Failed = 80,
    /// A defect of the library. The cache should not be used any further.
    Panic = 90,
}

/// An open cache.
pub struct HotsliceCache(Cache);

thread_local!(static LAST_ERROR: RefCell<CString> = RefCell::default());

fn note(text: &str) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // A thread that is being torn down keeps no text.
    let _ = LAST_ERROR.try_with(|last| *last.borrow_mut() = text);
}

fn status_of(error: &Error) -> HotsliceStatus {
    note(&error.to_string());
    match error {
        Error::Config { .. }
        | Error::KeyLength { .. }
        | Error::Namespace { .. }
        | Error::RangeOutside { .. } => HotsliceStatus::InvalidArgument,
        Error::Memory(error) if matches!(**error, MemoryError::Config { .. }) => {
            HotsliceStatus::InvalidArgument
        }
        Error::BufferTooSmall { .. } => HotsliceStatus::BufferTooSmall,
        Error::DeadlinePassed { .. } => HotsliceStatus::DeadlinePassed,
        Error::PeerUnavailable { .. }
        | Error::Protocol { .. }
        | Error::Refused { .. }
        | Error::Checksum { .. } => HotsliceStatus::Unavailable,
        Error::Pinned { .. } | Error::ValueTooLarge { .. } => HotsliceStatus::NoMemory,
        Error::ShutDown | Error::Forked => HotsliceStatus::Closed,
        _ => HotsliceStatus::Failed,
    }
}

/// The one boundary that panics do not cross.
fn guarded(body: impl FnOnce() -> Result<HotsliceStatus, HotsliceStatus>) -> HotsliceStatus {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(status) | Err(status)) => status,
        Err(_) => {
            note("a panic inside the library");
            HotsliceStatus::Panic
        }
    }
}

fn invalid(what: &str) -> HotsliceStatus {
    note(what);
    HotsliceStatus::InvalidArgument
}

/// # Safety
/// `cache` is null or came from `hotslice_open` and was not closed.
unsafe fn cache<'a>(cache: *const HotsliceCache) -> Result<&'a Cache, HotsliceStatus> {
    // SAFETY: the caller's promise.
    unsafe { cache.as_ref() }.map(|cache| &cache.0).ok_or_else(|| invalid("`cache` is null"))
}

/// # Safety
/// `bytes` is null or points to `len` readable bytes.
unsafe fn slice<'a>(bytes: *const u8, len: usize, name: &str) -> Result<&'a [u8], HotsliceStatus> {
    match (bytes.is_null(), len) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(invalid(&format!("`{name}` is null"))),
        // SAFETY: the caller's promise.
        (false, _) => Ok(unsafe { std::slice::from_raw_parts(bytes, len) }),
    }
}

fn after(deadline_ms: u64) -> Duration {
    Duration::from_millis(deadline_ms)
}

/// The version of the interface that the library was built with.
#[unsafe(no_mangle)]
pub extern "C" fn hotslice_abi_version() -> u32 {
    HOTSLICE_ABI_VERSION
}

/// What the last call on this thread that did not succeed had to say. Never null; valid until the next call
/// on this thread.
#[unsafe(no_mangle)]
pub extern "C" fn hotslice_last_error() -> *const c_char {
    LAST_ERROR.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Opens a cache of `capacity_bytes`. `origin` is `host:port` or `unix:/path`, several separated by commas, or null
/// for a purely local cache. Blocks until its memory is ready. On success `*out` is to be closed with `hotslice_close`.
///
/// # Safety
/// `origin` is null or a terminated string; `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotslice_open(
    capacity_bytes: u64,
    origin: *const c_char,
    out: *mut *mut HotsliceCache,
) -> HotsliceStatus {
    guarded(|| {
        if out.is_null() {
            return Err(invalid("`out` is null"));
        }
        let mut config = Config::new(capacity_bytes);
        if !origin.is_null() {
            // SAFETY: the caller's promise.
            let text =
                unsafe { CStr::from_ptr(origin) }.to_str().map_err(|_| invalid("`origin` is not UTF-8"))?;
            config.origin = hotslice::config::parse_peers("origin", text).map_err(|e| status_of(&e))?;
        }
        let cache = Cache::open(config).map_err(|e| status_of(&e))?;
        // SAFETY: not null, and the caller's promise.
        unsafe { *out = Box::into_raw(Box::new(HotsliceCache(cache))) };
        Ok(HotsliceStatus::Ok)
    })
}

/// Closes a cache: ends its threads and frees its memory. Blocks for as long as that takes. Null is allowed.
///
/// # Safety
/// `cache` is null or came from `hotslice_open`; no call uses it any longer, nor will.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotslice_close(cache: *mut HotsliceCache) {
    let _ = guarded(|| {
        if !cache.is_null() {
            // SAFETY: the caller's promise.
            drop(unsafe { Box::from_raw(cache) });
        }
        Ok(HotsliceStatus::Ok)
    });
}

/// Copies the value of a key into `buffer`, which may be longer, and writes its length to `*value_len`, also
/// when the buffer is too small (nothing is copied then). A miss blocks until `deadline_ms` from now.
///
/// # Safety
/// `cache` as above; `key` points to `key_len` bytes and `buffer` to `buffer_len` writable ones;
/// `value_len` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotslice_get_into(
    cache: *const HotsliceCache,
    key: *const u8,
    key_len: usize,
    buffer: *mut u8,
    buffer_len: usize,
    value_len: *mut u64,
    deadline_ms: u64,
) -> HotsliceStatus {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (cache, key) = unsafe { (self::cache(cache)?, slice(key, key_len, "key")?) };
        if value_len.is_null() || (buffer.is_null() && buffer_len > 0) {
            return Err(invalid("`buffer` or `value_len` is null"));
        }
        let buffer = match buffer_len {
            0 => &mut [][..],
            // SAFETY: not null, and the caller's promise.
            _ => unsafe { std::slice::from_raw_parts_mut(buffer, buffer_len) },
        };
        let (len, status) = match cache.get_into(Key::from(key), buffer, after(deadline_ms)) {
            Ok(Some(len)) => (len, HotsliceStatus::Ok),
            Ok(None) => {
                note("");
                return Ok(HotsliceStatus::Absent);
            }
            Err(error @ Error::BufferTooSmall { value_bytes, .. }) => (value_bytes, status_of(&error)),
            Err(error) => return Err(status_of(&error)),
        };
        // SAFETY: not null, and the caller's promise.
        unsafe { *value_len = len };
        Ok(status)
    })
}

/// Puts a value into the cache (not into the origin). The bytes are copied before the call returns.
///
/// # Safety
/// `cache` as above; `key` and `value` point to as many bytes as their lengths say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotslice_put(
    cache: *const HotsliceCache,
    key: *const u8,
    key_len: usize,
    value: *const u8,
    value_len: usize,
    deadline_ms: u64,
) -> HotsliceStatus {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (cache, key, value) =
            unsafe { (self::cache(cache)?, slice(key, key_len, "key")?, slice(value, value_len, "value")?) };
        cache.put(Key::from(key), value, after(deadline_ms)).map_err(|e| status_of(&e))?;
        Ok(HotsliceStatus::Ok)
    })
}

/// Forgets a key. When it returns, no later call is served with what was cached or being fetched before.
///
/// # Safety
/// `cache` as above; `key` points to `key_len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotslice_invalidate(
    cache: *const HotsliceCache,
    key: *const u8,
    key_len: usize,
    deadline_ms: u64,
) -> HotsliceStatus {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (cache, key) = unsafe { (self::cache(cache)?, slice(key, key_len, "key")?) };
        cache.invalidate(Invalidate::Key(Key::from(key)), after(deadline_ms)).map_err(|e| status_of(&e))?;
        Ok(HotsliceStatus::Ok)
    })
}

/// Writes the counters as JSON text, terminated, to `text` of `text_len` bytes. `BufferTooSmall` if they do
/// not fit; 4 KiB do.
///
/// # Safety
/// `cache` as above; `text` points to `text_len` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotslice_stats_json(
    cache: *const HotsliceCache,
    text: *mut c_char,
    text_len: usize,
) -> HotsliceStatus {
    guarded(|| {
        // SAFETY: the caller's promise.
        let cache = unsafe { self::cache(cache)? };
        if text.is_null() {
            return Err(invalid("`text` is null"));
        }
        let json = serde_json::to_string(&cache.stats()).map_err(|error| {
            note(&error.to_string());
            HotsliceStatus::Failed
        })?;
        if json.len() >= text_len {
            note("the counters do not fit");
            return Err(HotsliceStatus::BufferTooSmall);
        }
        // SAFETY: fits, with the terminator, and the caller's promise.
        unsafe {
            std::ptr::copy_nonoverlapping(json.as_ptr(), text.cast(), json.len());
            *text.add(json.len()) = 0;
        }
        Ok(HotsliceStatus::Ok)
    })
}
