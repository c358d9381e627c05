//! Contexts of every instruction set and number of threads, for comparisons with a reference.

#[path = "close.rs"]
mod close;

pub(crate) use close::assert_close;
use llaisys_core::ops::OpContext;
use llaisys_core::ops::dispatch::{IsaName, Kernels};
use llaisys_core::threads::Pool;

/// A context of an instruction set and a number of threads.
pub(crate) fn context(isa: IsaName, n_threads: usize) -> OpContext {
    let kernels = Kernels::select(Some(isa)).expect("the machine has the instruction set");
    let pool = Pool::new(n_threads).expect("threads start");
    OpContext::new(kernels, pool, 32, 64).expect("memory for the scratch")
}

/// Every instruction set on one, two and three threads.
pub(crate) fn contexts() -> Vec<OpContext> {
    IsaName::available().into_iter().flat_map(|isa| (1..=3).map(move |n| context(isa, n))).collect()
}

/// The name of a context for messages.
pub(crate) fn name(cx: &OpContext) -> String {
    format!("{:?} on {} threads", cx.kernels.isa(), cx.pool.n_threads())
}
