//! Python bindings of the core. Each call converts its arguments, calls the core once and converts the result. Long
//! calls release the GIL. The bindings have no policy, no loop and no state of their own.
//!
//! Errors are the classes of `llaisys.errors`. No panic reaches Python as pyo3's `PanicException`, a `BaseException`
//! that `except Exception` would miss.

#![warn(clippy::unwrap_used, reason = "no input causes a panic; a violated invariant panics with a message")]
#![allow(clippy::too_many_arguments, reason = "the signatures follow the keyword arguments of Python")]

use pyo3::prelude::*;

mod context;
mod convert;
mod cuda;
mod encoder;
mod errors;
#[allow(unsafe_code, reason = "calls `_exit`")]
mod exit;
#[cfg(feature = "faults")]
mod faults;
mod inspect;
mod kv_cache;
mod output;
mod owned;
mod sampler;
mod watchdog;

/// The compiled core of LLAISYS. `_core.pyi` declares it for Python.
#[pymodule]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::context::Context;
    #[pymodule_export]
    use super::cuda::{Gpu, cuda_info};
    #[pymodule_export]
    use super::encoder::Encoder;
    #[cfg(feature = "faults")]
    #[pymodule_export]
    use super::faults::{fault_hits, fault_points, set_fault};
    #[pymodule_export]
    use super::inspect::{available_isas, cuda_kernel_sources, inspect, philox4x32};
    #[pymodule_export]
    use super::kv_cache::{KvCache, Snapshot};
    #[pymodule_export]
    use super::output::DecodeOutput;
    #[pymodule_export]
    use super::sampler::SamplerSpec;
    #[pymodule_export]
    use super::watchdog::{Progress, Watchdog};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
