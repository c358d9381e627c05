//! `Owned`: a core object that one thread creates, uses and closes.
//!
//! Python classes are frozen, so Python has only shared references. The state is in a mutex that is never contended: the
//! owner is checked first, and it cannot be in two calls at the same time.

use crate::errors::{Fault, guarded, panic_message};
use llaisys_core::error::Rejected;
use pyo3::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::thread::ThreadId;

/// A core object whose calls may fail in the middle.
pub(crate) trait Core: Send {
    /// True after a panic or a device failure in the middle of a change.
    fn is_broken(&self) -> bool;
}

/// A core object with the thread and the process that own it.
pub(crate) struct Owned<C: Core> {
    owner: ThreadId,
    process: u32,
    state: Mutex<State<C>>,
}

enum State<C> {
    Open(Box<C>),
    Closed,
    /// The message of a panic or device failure that left the object inconsistent. After a panic, it is leaked.
    Dead(String),
}

impl<C: Core> Owned<C> {
    /// Owned by the calling thread.
    pub(crate) fn new(core: C) -> Self {
        Self {
            owner: std::thread::current().id(),
            process: std::process::id(),
            state: Mutex::new(State::Open(Box::new(core))),
        }
    }

    /// Runs `call` on the core. Rejects other threads and forked processes. A panic becomes [`Fault::RolledBack`] if
    /// the object is unchanged, else [`Fault::Panic`]. After the latter and after a device failure, every later call
    /// fails with [`Fault::Dead`].
    fn call<T>(&self, call: impl FnOnce(&mut C) -> Result<T, llaisys_core::Error>) -> Result<T, Fault> {
        self.check_owner()?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let core = match &mut *state {
            State::Open(core) => core,
            State::Closed => return Err(Fault::Core(Rejected::Closed.into())),
            State::Dead(message) => return Err(Fault::Dead(message.clone())),
        };
        let payload = match catch_unwind(AssertUnwindSafe(|| call(core))) {
            Ok(Err(error)) if core.is_broken() => {
                *state = State::Dead(error.to_string());
                return Err(Fault::Core(error));
            }
            Ok(result) => return result.map_err(Fault::Core),
            Err(payload) => payload,
        };
        let message = panic_message(payload.as_ref());
        if !core.is_broken() {
            return Err(Fault::RolledBack(message));
        }
        if let State::Open(core) = std::mem::replace(&mut *state, State::Dead(message.clone())) {
            std::mem::forget(core);
        }
        Err(Fault::Panic(message))
    }

    fn check_owner(&self) -> Result<(), Fault> {
        if std::process::id() != self.process {
            return Err(Fault::ForeignProcess);
        }
        if std::thread::current().id() != self.owner {
            return Err(Fault::ForeignThread);
        }
        Ok(())
    }

    /// Runs a short call without releasing the GIL.
    pub(crate) fn brief<T>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut C) -> Result<T, llaisys_core::Error>,
    ) -> PyResult<T> {
        self.call(call).map_err(|fault| fault.into_py(py))
    }

    /// Runs a long call with the GIL released.
    pub(crate) fn detached<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut C) -> Result<T, llaisys_core::Error> + Send,
    ) -> PyResult<T> {
        py.detach(|| self.call(call)).map_err(|fault| fault.into_py(py))
    }

    /// Frees all resources; idempotent.
    pub(crate) fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.check_owner().map_err(|fault| fault.into_py(py))?;
        let state = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *state, State::Closed)
        };
        py.detach(|| {
            guarded(|| {
                drop(state);
                Ok(())
            })
        })
        .map_err(|fault| fault.into_py(py))
    }
}

/// Runs without `close` at interpreter exit, or by the garbage collector on any thread. Freeing calls no Python, and no
/// panic leaves it. In a forked process the worker threads do not exist and cannot be joined, so the core is leaked.
impl<C: Core> Drop for Owned<C> {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let state = std::mem::replace(state, State::Closed);
        if std::process::id() != self.process {
            std::mem::forget(state);
        } else if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(state))) {
            std::mem::forget(payload);
        }
    }
}
