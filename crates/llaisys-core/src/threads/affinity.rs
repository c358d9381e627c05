//! The CPUs on which threads may run, and the CPU on which a thread runs.
//!
//! `cpu_set_t` is a fixed array of bits: ids are checked against [`CPU_ID_MAX`] by [`super::Pool::on`].

#![allow(unsafe_code, reason = "reads and sets CPU masks")]

#[cfg(target_os = "linux")]
pub(super) use linux::{CPU_ID_MAX, move_to, pin_to, usable_cpus};
#[cfg(not(target_os = "linux"))]
pub(super) use other::{CPU_ID_MAX, move_to, pin_to, usable_cpus};

#[cfg(target_os = "linux")]
mod linux {
    /// The largest id that an affinity mask can represent.
    pub(in crate::threads) const CPU_ID_MAX: usize = libc::CPU_SETSIZE as usize - 1;

    /// See [`crate::threads::usable_cpus`].
    pub(in crate::threads) fn usable_cpus() -> Vec<usize> {
        let Some(set) = mask() else { return Vec::new() };
        // SAFETY: the index is below the number of bits of the set.
        (0..=CPU_ID_MAX).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect()
    }

    /// Pins the calling thread to `cpu`. A failure only costs speed, so it is not reported.
    pub(in crate::threads) fn pin_to(cpu: usize) {
        assert!(cpu <= CPU_ID_MAX, "CPU id {cpu} does not fit an affinity mask");
        // SAFETY: an all-zero `cpu_set_t` is the empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: `cpu` is at most `CPU_ID_MAX` (asserted), below the number of bits of the set.
        unsafe { libc::CPU_SET(cpu, &mut set) };
        set_mask(&set);
    }

    /// Moves the calling thread to `cpu` if it runs on another, and restores its affinity mask.
    pub(in crate::threads) fn move_to(cpu: usize) {
        // SAFETY: takes nothing; an error is a negative number, which is no CPU.
        let current = unsafe { libc::sched_getcpu() };
        if usize::try_from(current).is_ok_and(|current| current != cpu)
            && let Some(mask) = mask()
        {
            pin_to(cpu);
            set_mask(&mask);
        }
    }

    /// The calling thread's affinity mask.
    fn mask() -> Option<libc::cpu_set_t> {
        // SAFETY: an all-zero `cpu_set_t` is the empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: the pointer is valid for the size given; pid 0 is the calling thread.
        let rc = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) };
        (rc == 0).then_some(set)
    }

    fn set_mask(set: &libc::cpu_set_t) {
        // SAFETY: the pointer is valid for the size given; pid 0 is the calling thread.
        unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), set) };
    }
}

/// Systems without affinity masks: threads are never pinned.
#[cfg(not(target_os = "linux"))]
mod other {
    pub(in crate::threads) const CPU_ID_MAX: usize = i32::MAX as usize;

    pub(in crate::threads) fn usable_cpus() -> Vec<usize> {
        Vec::new()
    }
    pub(in crate::threads) fn pin_to(_cpu: usize) {}
    pub(in crate::threads) fn move_to(_cpu: usize) {}
}
