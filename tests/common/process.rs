//! What this process takes, as Linux and its C library tell.

use std::time::{Duration, Instant};

/// The least time of a few attempts. Other programs may hold the cores, so an attempt over `limit` is repeated.
pub fn least_time(limit: Duration, mut attempt: impl FnMut() -> Duration) -> Duration {
    let mut least = Duration::MAX;
    for _ in 0..5 {
        least = least.min(attempt());
        if least < limit {
            break;
        }
    }
    least
}

/// Processor time of all threads.
#[cfg(target_os = "linux")]
pub fn processor_time() -> Duration {
    unsafe extern "C" {
        fn clock_gettime(clock: i32, time: *mut [i64; 2]) -> i32;
    }
    const PROCESS: i32 = 2;
    let mut time = [0; 2];
    // SAFETY: a timespec is two 64-bit numbers on 64-bit Linux.
    assert_eq!(unsafe { clock_gettime(PROCESS, &mut time) }, 0);
    Duration::new(time[0] as u64, time[1] as u32)
}

/// The time, where the system does not tell the processor's.
#[cfg(not(target_os = "linux"))]
pub fn processor_time() -> Duration {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

/// The threads of this process now. Those that were just joined are among them for a moment.
#[cfg(target_os = "linux")]
pub fn threads_now() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// The fewest threads within a while.
#[cfg(target_os = "linux")]
pub fn threads_at_rest() -> usize {
    let count = |_| {
        std::thread::sleep(Duration::from_millis(2));
        threads_now()
    };
    (0..50).map(count).min().expect("counts")
}

/// The number of threads, once it is as `expected`, or after 20 seconds.
#[cfg(target_os = "linux")]
pub fn settled_threads(expected: usize) -> usize {
    let start = Instant::now();
    while threads_now() != expected && start.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(1));
    }
    threads_now()
}

/// A figure of /proc/self/status in bytes, such as VmRSS; 0 where the system does not tell.
pub fn status_bytes(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap_or("0 kB");
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Bytes that are allocated and not freed, in this process and the library.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn allocated_bytes() -> usize {
    /// `struct mallinfo2` of the C library.
    #[repr(C)]
    struct MallocInfo {
        unused: [usize; 4],
        mapped_bytes: usize,
        unused_too: [usize; 2],
        used_bytes: usize,
        free_bytes: usize,
        trimmable_bytes: usize,
    }
    unsafe extern "C" {
        fn mallinfo2() -> MallocInfo;
    }
    // SAFETY: the C library has it since version 2.33.
    let info = unsafe { mallinfo2() };
    info.mapped_bytes + info.used_bytes
}

/// The C library gives freed memory back at once. By default each thread's part keeps up to 64 MiB, and resident bytes
/// would tell about that.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn keep_no_freed_memory() {
    const TRIM_THRESHOLD: i32 = -1;
    const MMAP_THRESHOLD: i32 = -3;
    unsafe extern "C" {
        fn mallopt(option: i32, value: i32) -> i32;
    }
    for option in [TRIM_THRESHOLD, MMAP_THRESHOLD] {
        // SAFETY: takes numbers.
        assert_eq!(unsafe { mallopt(option, 128 << 10) }, 1);
    }
}
