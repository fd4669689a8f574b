//! Tests that change their whole process (limits, filters, forks) run in a child of their own.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Instant;

const VARIABLE: &str = "HOTSLICE_TEST_CHILD";

/// Exit status of a child that found it cannot test here what it is for.
const SKIPPED: i32 = 77;

/// In a child: ends it, saying why its test cannot be run here. The test counts as passed.
pub fn skip(why: &str) -> ! {
    eprintln!("skipped: {why}");
    std::process::exit(SKIPPED);
}

/// Runs `body` in a child process: this test binary, started again for this test alone. `name` is the test's
/// full name (`file::function`). Panics if the child fails, and kills it when it hangs.
#[track_caller]
pub fn in_child(name: &str, body: impl FnOnce()) {
    if let Some(status) = spawn(name, body) {
        assert!(status.success(), "the child of {name} ended with {status}; its output is above");
    }
}

/// [`in_child`] for a child that is expected to be killed by `signal`.
#[track_caller]
pub fn killed_by(signal: i32, name: &str, body: impl FnOnce()) {
    if let Some(status) = spawn(name, body) {
        assert_eq!(status.signal(), Some(signal), "the child of {name} ended with {status}");
    }
}

/// In the parent: how the child ended, `None` if it was skipped. In the child: `None`, after `body` ran.
fn spawn(name: &str, body: impl FnOnce()) -> Option<ExitStatus> {
    match std::env::var(VARIABLE) {
        Ok(wanted) if wanted == name => {
            body();
            return None;
        }
        Ok(other) => panic!("child of {other} was asked to run {name}"),
        Err(_) => {}
    }
    let program = std::env::current_exe().expect("the path of the test binary");
    let mut child = Command::new(program)
        .args([name, "--exact", "--nocapture", "--include-ignored"])
        .env(VARIABLE, name)
        .stdin(Stdio::null())
        .spawn()
        .expect("start a child");
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("wait for the child") {
            return (status.code() != Some(SKIPPED)).then_some(status);
        }
        if started.elapsed() > 3 * crate::sync::HANG {
            let _ = child.kill();
            let _ = child.wait();
            panic!("the child of {name} hung");
        }
        // A child's end can be awaited only with a signal handler of the whole process: look now and then.
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Makes every system call in `numbers` fail with EPERM for this thread and the threads it starts. False if
/// the kernel does not let us.
pub fn forbid(numbers: &[libc::c_long]) -> bool {
    let mut program = vec![load_number()];
    for number in numbers {
        program.push(jump_if_equal(*number, 0, 1));
        program.push(answer(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32));
    }
    program.push(answer(libc::SECCOMP_RET_ALLOW));
    install(&program)
}

/// Kills the process (SIGSYS) at any system call of this thread but `exit_group`. False if the kernel does not
/// let us.
pub fn kill_at_any_system_call() -> bool {
    install(&[
        load_number(),
        jump_if_equal(libc::SYS_exit_group, 0, 1),
        answer(libc::SECCOMP_RET_ALLOW),
        answer(libc::SECCOMP_RET_KILL_PROCESS),
    ])
}

/// `struct seccomp_data` begins with the number of the system call.
fn load_number() -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, jt: 0, jf: 0, k: 0 }
}

fn jump_if_equal(number: libc::c_long, jt: u8, jf: u8) -> libc::sock_filter {
    let code = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    libc::sock_filter { code, jt, jf, k: number as u32 }
}

fn answer(verdict: u32) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: verdict }
}

fn install(program: &[libc::sock_filter]) -> bool {
    let filter = libc::sock_fprog {
        len: u16::try_from(program.len()).expect("a short program"),
        filter: program.as_ptr().cast_mut(),
    };
    // SAFETY: plain numbers.
    let promised = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // SAFETY: the kernel copies the program, which is not changed, before the call returns.
    promised == 0
        && unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) } == 0
}

/// Sets the soft limit of open files and returns the former one.
pub fn limit_files(soft: u64) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes a local.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) }, 0);
    let former = std::mem::replace(&mut limit.rlim_cur, soft);
    // SAFETY: reads a local.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
    former
}
