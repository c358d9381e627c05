//! Kernels of every instruction set and number of threads, beside a reference.

#[path = "close.rs"]
mod close;

pub(crate) use close::assert_close;
use llaisys_core::ops::OpContext;
use llaisys_core::ops::dispatch::{IsaName, Kernels};
use llaisys_core::threads::Pool;

/// An instruction set on so many threads.
pub(crate) fn context(isa: IsaName, n_threads: usize) -> OpContext {
    let kernels = Kernels::select(Some(isa)).expect("the machine has it");
    let pool = Pool::new(n_threads).expect("threads start");
    OpContext::new(kernels, pool, 32, 64).expect("memory for the scratch")
}

/// Every instruction set on one, two and three threads.
pub(crate) fn contexts() -> Vec<OpContext> {
    IsaName::available().into_iter().flat_map(|isa| (1..=3).map(move |n| context(isa, n))).collect()
}

/// For messages.
pub(crate) fn name(cx: &OpContext) -> String {
    format!("{:?} on {} threads", cx.kernels.isa(), cx.pool.n_threads())
}
