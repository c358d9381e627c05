//! The emulator's exchanges: elements are converted to f32, exchanged between threads, and sums are rounded once.

use super::memory::Memory;
use super::product::{decode, encode, size_of};
use llaisys_core::collective::{Collective, LocalRank};
use llaisys_core::cuda::device::{DevicePtr, Element, Exchange};
use llaisys_core::error::DeviceError;

/// Runs an exchange with the other ranks, which run the same one.
pub(crate) fn exchange(
    memory: &mut Memory,
    others: &mut LocalRank,
    exchange: &Exchange,
) -> Result<(), DeviceError> {
    let fails = |status| DeviceError::Cuda { op: exchange.to_string(), status };
    let read = |memory: &Memory, at: DevicePtr, n: usize, element: Element| {
        let bytes = memory.bytes(at, n * size_of(element)).map_err(fails)?;
        Ok::<_, DeviceError>(decode(element, bytes))
    };
    let (to, values, element) = match *exchange {
        Exchange::AllReduceSum { at, n, element } => {
            let mut values = read(memory, at, n, element)?;
            others.all_reduce_sum(&mut values)?;
            (at, values, element)
        }
        Exchange::AllGather { from, to, n, element } => {
            let mut values = vec![0.0; n * others.world()];
            others.all_gather(&read(memory, from, n, element)?, &mut values)?;
            (to, values, element)
        }
        Exchange::Broadcast { at, n, element, root } => {
            let mut values = read(memory, at, n, element)?;
            others.broadcast(&mut values, root)?;
            (at, values, element)
        }
    };
    let bytes = encode(element, &values);
    memory.bytes_mut(to, bytes.len()).map_err(fails)?.copy_from_slice(&bytes);
    Ok(())
}
