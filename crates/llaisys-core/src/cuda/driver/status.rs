//! What a status of the driver means for whoever called (CUDA Driver API, `CUresult`).

use crate::cuda::kernel_source::Function;
use crate::error::DeviceError;
use cudarc::driver::result::DriverError;
use std::sync::OnceLock;

/// The error after which this process's CUDA context answers nothing more.
static LOST: OnceLock<String> = OnceLock::new();

/// What can be done about a status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// Device memory is used up: less is to be asked for.
    OutOfMemory,
    /// What was captured is lost, the device is well: it can be done without a graph.
    Capture,
    /// The context is lost, and with it everything on the device: only a new process has another.
    Fatal,
    /// This call failed.
    Call,
}

/// By the number of the status.
pub fn severity(status: u32) -> Severity {
    match status {
        2 => Severity::OutOfMemory,
        700 | 702 | 710 | 714..=719 | 999 => Severity::Fatal,
        900..=908 => Severity::Capture,
        _ => Severity::Call,
    }
}

/// Notes that the process's context is lost; the first cause stays.
pub fn note_lost(cause: &str) {
    let _ = LOST.set(cause.to_owned());
}

/// Why no device can be opened in this process any more.
pub fn lost() -> Option<String> {
    LOST.get().map(|cause| format!("CUDA failed in this process ({cause}): restart it"))
}

/// What is said when an arena does not fit: the numbers, and the settings that make it smaller.
pub fn out_of_memory(n_bytes: usize, free: usize, total: usize) -> String {
    let gib = |n: usize| n as f64 / (1_u64 << 30) as f64;
    format!(
        "{:.2} GiB are wanted, {:.2} of {:.2} GiB are free: lower gpu_memory_utilization, \
         max_num_batched_tokens or max_num_seqs, or end what else uses the GPU",
        gib(n_bytes),
        gib(free),
        gib(total)
    )
}

/// A launch in an error.
pub fn launch_name(function: &Function) -> String {
    format!("launch {} of {}", function.name, function.module)
}

/// Returns the error of a driver's call, and remembers one after which the context is lost.
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
    fn each_status_of_the_design_has_its_severity() {
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
    fn after_a_fatal_error_the_process_has_no_cuda() {
        assert_eq!(lost(), None);
        note_lost("CUDA_ERROR_ILLEGAL_ADDRESS (700)");
        note_lost("CUDA_ERROR_LAUNCH_FAILED (719)");
        let text = lost().unwrap();
        assert!(text.contains("700") && !text.contains("719") && text.contains("restart"), "{text}");
    }

    #[test]
    fn what_does_not_fit_is_said_in_numbers() {
        let text = out_of_memory(3 << 30, 1 << 30, 80 << 30);
        assert!(text.contains("3.00 GiB") && text.contains("1.00 of 80.00 GiB"), "{text}");
        assert!(text.contains("gpu_memory_utilization"), "{text}");
    }
}
