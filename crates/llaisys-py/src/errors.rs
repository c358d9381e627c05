//! Maps core errors to Python classes. The matches are exhaustive: a new kind of error does not compile without a
//! class.

use llaisys_core::Error;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Characters of a message that are shown.
const MESSAGE_CHARS_MAX: usize = 1000;

/// The failures of a call into the core.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The core returned an error.
    Core(Error),
    /// The core panicked and rolled back: its context has not changed.
    RolledBack(String),
    /// The core panicked in the middle of a change or outside of any context.
    Panic(String),
    /// An earlier call broke the context; the message of its failure.
    Dead(String),
    /// Called from another thread than the one that created the context.
    ForeignThread,
    /// Called in a process forked after the context was created, where its worker threads do not exist.
    ForeignProcess,
    /// An invalid argument that is not passed to the core: a string or an array layout.
    Argument(String),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Fault::Core(error)
    }
}

impl Fault {
    /// The exception to raise.
    pub(crate) fn into_py(self, py: Python<'_>) -> PyErr {
        let (class, message) = match self {
            Fault::Core(error) => (Class::of(&error), shortened(error.to_string())),
            Fault::RolledBack(message) => {
                (Class::CoreFault, format!("the core panicked and rolled back: {message}"))
            }
            Fault::Panic(message) => (Class::EngineDead, format!("the core panicked: {message}")),
            Fault::Dead(message) => {
                (Class::EngineDead, format!("the context was broken by an earlier failure: {message}"))
            }
            Fault::ForeignThread => (
                Class::Rejected,
                "the context belongs to the thread that built it; call it from there".to_owned(),
            ),
            Fault::ForeignProcess => (
                Class::EngineDead,
                "the context was built before a fork; build one in this process".to_owned(),
            ),
            Fault::Argument(message) => (Class::Rejected, message),
        };
        match class.python(py) {
            Ok(class) => PyErr::from_type(class.clone(), (message,)),
            Err(import_error) => import_error,
        }
    }
}

/// Runs core code outside of any context. A panic becomes [`Fault::Panic`].
pub(crate) fn guarded<T>(call: impl FnOnce() -> Result<T, Error>) -> Result<T, Fault> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(Fault::Core),
        Err(payload) => Err(Fault::Panic(panic_message(payload.as_ref()))),
    }
}

/// Shortens a message, which may contain a value of a model file of a megabyte.
fn shortened(message: String) -> String {
    match message.char_indices().nth(MESSAGE_CHARS_MAX) {
        Some((end, _)) => format!("{} ...", &message[..end]),
        None => message,
    }
}

/// Returns the message of a panic.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").to_owned()
}

/// The classes of `llaisys.errors` that the core raises.
#[derive(Clone, Copy)]
enum Class {
    Rejected,
    Exhausted,
    Unsupported,
    CoreFault,
    EngineDead,
}

impl Class {
    fn of(error: &Error) -> Class {
        match error {
            Error::Rejected(_) => Class::Rejected,
            Error::Exhausted(_) => Class::Exhausted,
            Error::Unsupported(_) => Class::Unsupported,
            Error::Device(_) => Class::EngineDead,
            #[cfg(feature = "faults")]
            Error::Injected { .. } => Class::CoreFault,
        }
    }

    /// Returns the class object, which is imported at the first error.
    fn python<'py>(self, py: Python<'py>) -> PyResult<&'py Bound<'py, PyType>> {
        static REJECTED: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        static EXHAUSTED: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        static UNSUPPORTED: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        static CORE_FAULT: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        static ENGINE_DEAD: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let (cell, name) = match self {
            Class::Rejected => (&REJECTED, "RejectedError"),
            Class::Exhausted => (&EXHAUSTED, "ExhaustedError"),
            Class::Unsupported => (&UNSUPPORTED, "UnsupportedError"),
            Class::CoreFault => (&CORE_FAULT, "CoreFaultError"),
            Class::EngineDead => (&ENGINE_DEAD, "EngineDeadError"),
        };
        cell.import(py, "llaisys.errors", name)
    }
}
