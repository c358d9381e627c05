//! Fault points for tests (Cargo feature `faults`). They are not in `_core.pyi`, because released builds do not have
//! them.

use crate::errors::Fault;
use llaisys_core::faults::{Action, SetError, hits, names, set};
use pyo3::prelude::*;

/// The names of all fault points.
#[pyfunction]
pub(crate) fn fault_points() -> Vec<&'static str> {
    names().collect()
}

/// How often a point was reached.
#[pyfunction]
pub(crate) fn fault_hits(py: Python<'_>, point: &str) -> PyResult<u64> {
    hits(point).ok_or_else(|| Fault::Argument(format!("no fault point {point:?}")).into_py(py))
}

/// Makes a point do `action` once, the `nth` time (from 1) that it is reached from now on. Actions are `error`,
/// `panic`, `pause` and `leak`; `off` ends a pause. A pause with the GIL held cannot be ended from Python; only
/// `decode.*` points run without it.
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
