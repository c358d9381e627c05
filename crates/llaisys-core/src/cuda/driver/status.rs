//! What a status of the driver means for the caller (CUDA Driver API, `CUresult`).

use crate::cuda::kernel_source::Function;
use crate::error::DeviceError;
use cudarc::driver::result::DriverError;
use std::sync::OnceLock;

/// The error after which this process's CUDA context is unusable.
static LOST: OnceLock<String> = OnceLock::new();

/// What the caller can do after a status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// Device memory is exhausted: allocate less.
    OutOfMemory,
    /// The capture is lost and the device still works: run the work without a graph.
    Capture,
    /// The context and everything on the device are lost: only a new process can use the device.
    Fatal,
    /// Only this call failed.
    Call,
}

/// Returns the severity of a status.
pub fn severity(status: u32) -> Severity {
    match status {
        2 => Severity::OutOfMemory,
        700 | 702 | 710 | 714..=719 | 999 => Severity::Fatal,
        900..=908 => Severity::Capture,
        _ => Severity::Call,
    }
}

/// Records that the process's context is lost. The first cause is kept.
pub fn note_lost(cause: &str) {
    let _ = LOST.set(cause.to_owned());
}

/// Returns why no device can be opened in this process any more, if that is so.
pub fn lost() -> Option<String> {
    LOST.get().map(|cause| format!("CUDA failed in this process ({cause}): restart it"))
}

/// Returns the error text for an allocation that does not fit: the numbers, and the settings that make it smaller.
pub fn out_of_memory(n_bytes: usize, free: usize, total: usize) -> String {
    let gib = |n: usize| n as f64 / (1_u64 << 30) as f64;
    format!(
        "{:.2} GiB are needed, {:.2} of {:.2} GiB are free: lower gpu_memory_utilization, \
         max_num_batched_tokens or max_num_seqs, or stop other programs that use the GPU",
        gib(n_bytes),
        gib(free),
        gib(total)
    )
}

/// Returns the name of a launch for errors.
pub fn launch_name(function: &Function) -> String {
    format!("launch {} of {}", function.name, function.module)
}

/// Returns the error of a driver's call, and records a fatal one.
pub(super) fn fail(op: impl Into<String>, e: DriverError) -> DeviceError {
    let number = e.0 as u32;
    let name = e.error_name().map_or("unknown".into(), |name| name.to_string_lossy());
    let status = format!("{name} ({number})");
    if severity(number) == Severity::Fatal {
        note_lost(&status);
    }
    DeviceError::Cuda { op: op.into(), status }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_status_has_its_severity() {
        assert_eq!(severity(2), Severity::OutOfMemory);
        for fatal in [700, 702, 710, 714, 715, 716, 717, 718, 719, 999] {
            assert_eq!(severity(fatal), Severity::Fatal, "{fatal}");
        }
        for capture in [900, 901, 905, 907, 908] {
            assert_eq!(severity(capture), Severity::Capture, "{capture}");
        }
        for call in [1, 100, 209, 222, 400, 500, 600, 701, 704, 720, 801, 911] {
            assert_eq!(severity(call), Severity::Call, "{call}");
        }
    }

    #[test]
    fn a_fatal_error_makes_cuda_unusable_in_the_process() {
        assert_eq!(lost(), None);
        note_lost("CUDA_ERROR_ILLEGAL_ADDRESS (700)");
        note_lost("CUDA_ERROR_LAUNCH_FAILED (719)");
        let text = lost().unwrap();
        assert!(text.contains("700") && !text.contains("719") && text.contains("restart"), "{text}");
    }

    #[test]
    fn an_allocation_that_does_not_fit_is_reported_with_its_numbers() {
        let text = out_of_memory(3 << 30, 1 << 30, 80 << 30);
        assert!(text.contains("3.00 GiB") && text.contains("1.00 of 80.00 GiB"), "{text}");
        assert!(text.contains("gpu_memory_utilization"), "{text}");
    }
}
