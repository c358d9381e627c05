//! The fault points, for tests (cargo feature `faults`). Not in `_core.pyi`: no shipped build has them.

use crate::errors::Fault;
use llaisys_core::faults::{Action, SetError, hits, names, set};
use pyo3::prelude::*;

/// Every place where a test can make the core fail.
#[pyfunction]
pub(crate) fn fault_points() -> Vec<&'static str> {
    names().collect()
}

/// How often a point was passed.
#[pyfunction]
pub(crate) fn fault_hits(py: Python<'_>, point: &str) -> PyResult<u64> {
    hits(point).ok_or_else(|| Fault::Argument(format!("no fault point {point:?}")).into_py(py))
}

/// Lets a point do `action` (`error`, `panic`, `pause`, `leak`; `off` ends a pause) the `nth` time, from 1, that it is
/// passed from now on, once. A pause under the GIL cannot be ended from Python: only `decode.*` run without.
#[pyfunction]
#[pyo3(signature = (point, action, nth = 1))]
pub(crate) fn set_fault(py: Python<'_>, point: &str, action: &str, nth: u64) -> PyResult<()> {
    let result = Action::parse(action).ok_or(SetError::NoSuchAction).and_then(|it| set(point, it, nth));
    result.map_err(|error| {
        let message = match error {
            SetError::NoSuchPoint => format!("no fault point {point:?}"),
            SetError::NoSuchAction => format!("fault point {point:?} cannot do {action:?}"),
        };
        Fault::Argument(message).into_py(py)
    })
}
