//! Matrix products by cublasLt. The algorithm of each shape is chosen once and kept.
//!
//! cublasLt is column-major: the row-major `out[m, n] = input[m, k] . weight[n, k]^T` is its `D[n, m] = A^T . B` with
//! `A = weight` (`k x n`), `B = input` (`k x m`).

use crate::cuda::device::{DevicePtr, Element, Product};
use crate::error::DeviceError;
use cudarc::cublaslt::{result, result::CublasError, sys};
use cudarc::driver::sys::CUstream;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;

/// cublasLt of CUDA 13.0: the library that the loader finds must be of the expected generation.
const VERSION_MIN: usize = 130_000;
/// CUBLAS_OP_T of cublas_api.h. cudarc declares it only with its cublas feature.
const TRANSPOSED: i32 = 1;
/// CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE of cublasLt.h: parts of a sum over k are added in f32. The other schemes round
/// each part to the type of the result.
const REDUCED_IN_F32: u32 = 2;

/// The properties that an algorithm is chosen by. The number of rows is exact: steps have few shapes, and an algorithm
/// that was chosen for other rows may not support these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PlanKey {
    m: usize,
    n: usize,
    k: usize,
    element: Element,
    out_element: Element,
    has_bias: bool,
}

impl PlanKey {
    /// Returns the key of a product, which is independent of its pointers.
    pub fn of(product: &Product) -> Self {
        let Product { m, n, k, element, out_element, bias, .. } = *product;
        Self { m, n, k, element, out_element, has_bias: bias != DevicePtr::NULL }
    }
}

/// Returns the bytes of workspace that products of a device may use, as NVIDIA recommends by architecture.
pub fn workspace_bytes(capability: u32) -> usize {
    if capability >= 90 { 32 << 20 } else { 4 << 20 }
}

/// A cublasLt handle with its plans.
#[derive(Debug)]
pub(super) struct Blas {
    handle: sys::cublasLtHandle_t,
    workspace: DevicePtr,
    workspace_bytes: usize,
    plans: HashMap<PlanKey, Plan>,
}

#[derive(Debug)]
struct Plan {
    desc: sys::cublasLtMatmulDesc_t,
    /// The layouts of A, B and D.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algo: sys::cublasLtMatmulAlgo_t,
}

impl Blas {
    /// Creates a handle with a workspace in device memory. The library is loaded, because a [`super::probe::Cuda`]
    /// existed.
    ///
    /// Errors: a version that is too old; cublasLt does not start.
    pub(super) fn new(workspace: DevicePtr, workspace_bytes: usize) -> Result<Self, DeviceError> {
        // SAFETY: the library is loaded, and the function has no parameters.
        let version = unsafe { sys::cublasLtGetVersion() };
        if version < VERSION_MIN {
            return Err(DeviceError::Cuda {
                op: "start cublasLt".to_owned(),
                status: format!(
                    "the loader found version {version}, {VERSION_MIN} is needed: check LD_LIBRARY_PATH"
                ),
            });
        }
        let handle = result::create_handle().map_err(|e| fail("start cublasLt".to_owned(), e))?;
        Ok(Self { handle, workspace, workspace_bytes, plans: HashMap::new() })
    }

    /// Launches a product on `stream`.
    ///
    /// Errors: no algorithm for the shape; a failed launch.
    ///
    /// # Safety
    /// `stream` belongs to the device of this handle, and [`Product::check`] accepted the arrays, which live as long as
    /// the device.
    pub(super) unsafe fn start(&mut self, product: &Product, stream: CUstream) -> Result<(), DeviceError> {
        let key = PlanKey::of(product);
        let fails = |e| fail(format!("product {key:?}"), e);
        if !self.plans.contains_key(&key) {
            let plan = self.plan(key).map_err(fails)?;
            self.plans.insert(key, plan);
        }
        let plan = &self.plans[&key];
        if key.has_bias {
            let pointer = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            set(plan.desc, pointer, &product.bias.address()).map_err(fails)?;
        }
        let (one, zero) = (1.0_f32, 0.0_f32);
        let address = |pointer: DevicePtr| pointer.address() as *const c_void;
        let [a, b, d] = plan.layouts;
        // SAFETY: handle, descriptor, layouts and algorithm live in `self`; the caller promises stream and arrays.
        let started = unsafe {
            result::matmul(
                self.handle,
                plan.desc,
                ptr::from_ref(&one).cast(),
                ptr::from_ref(&zero).cast(),
                address(product.weight),
                a,
                address(product.input),
                b,
                address(product.out),
                d,
                address(product.out).cast_mut(),
                d,
                &plan.algo,
                address(self.workspace).cast_mut(),
                self.workspace_bytes,
                stream.cast(),
            )
        };
        started.map_err(fails)
    }

    fn plan(&self, key: PlanKey) -> Result<Plan, CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let (element, out) = (data_type(key.element), data_type(key.out_element));
        let layout = |kind, rows: usize, columns: usize| {
            result::create_matrix_layout(kind, rows as u64, columns as u64, rows as i64)
        };
        let layouts =
            [layout(element, key.k, key.n)?, layout(element, key.k, key.m)?, layout(out, key.n, key.m)?];
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let desc = result::create_matmul_desc(compute, data_type(Element::F32))?;
        set(desc, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        if key.has_bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            set(desc, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            set(desc, Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &element)?;
        }
        let preference = result::create_matmul_pref()?;
        let [a, b, d] = layouts;
        // SAFETY: every handle that is passed was created above and not destroyed; the attributes' values are a size_t
        // and a uint32_t.
        let chosen = unsafe {
            use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
            let bytes = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let value = ptr::from_ref(&self.workspace_bytes);
            let mask = Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
            result::set_matmul_pref_attribute(preference, bytes, value.cast(), size_of::<usize>())
                .and_then(|()| {
                    let value = ptr::from_ref(&REDUCED_IN_F32);
                    result::set_matmul_pref_attribute(preference, mask, value.cast(), size_of::<u32>())
                })
                .and_then(|()| result::get_matmul_algo_heuristic(self.handle, desc, a, b, d, d, preference))
        };
        // SAFETY: it was created above and is not used again.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        Ok(Plan { desc, layouts, algo: chosen?.algo })
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        for plan in self.plans.values() {
            // SAFETY: `plan` created each, nothing else owns it, and no host call uses it any more.
            unsafe {
                let _ = result::destroy_matmul_desc(plan.desc);
                for layout in plan.layouts {
                    let _ = result::destroy_matrix_layout(layout);
                }
            }
        }
        // SAFETY: `new` created the handle.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

fn set<T>(
    desc: sys::cublasLtMatmulDesc_t,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<(), CublasError> {
    // SAFETY: the descriptor lives; each caller passes the type that cublasLt.h gives the attribute.
    unsafe { result::set_matmul_desc_attribute(desc, attribute, ptr::from_ref(value).cast(), size_of::<T>()) }
}

fn data_type(element: Element) -> sys::cudaDataType {
    match element {
        Element::Bf16 => sys::cudaDataType::CUDA_R_16BF,
        Element::F16 => sys::cudaDataType::CUDA_R_16F,
        Element::F32 => sys::cudaDataType::CUDA_R_32F,
    }
}

fn fail(op: String, e: CublasError) -> DeviceError {
    DeviceError::Cuda { op, status: e.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pointer(address: u64) -> DevicePtr {
        DevicePtr::of_test(address, 0x100)
    }

    #[test]
    fn products_share_a_plan_if_and_only_if_their_shapes_are_equal() {
        let product = Product {
            m: 3,
            n: 64,
            k: 128,
            element: Element::Bf16,
            out_element: Element::Bf16,
            input: pointer(0x100),
            weight: pointer(0x200),
            bias: DevicePtr::NULL,
            out: pointer(0x300),
        };
        let key = PlanKey::of(&product);
        let elsewhere = Product { weight: pointer(0x400), out: pointer(0x500), ..product };
        assert_eq!(PlanKey::of(&elsewhere), key);
        let others = [
            Product { m: 4, ..product },
            Product { n: 65, ..product },
            Product { k: 129, ..product },
            Product { element: Element::F16, ..product },
            Product { out_element: Element::F32, ..product },
            Product { bias: pointer(0x600), ..product },
        ];
        for other in others {
            assert_ne!(PlanKey::of(&other), key, "{other:?}");
        }
    }

    #[test]
    fn hopper_and_newer_get_the_larger_workspace() {
        assert_eq!([80, 89, 90, 120].map(workspace_bytes), [4 << 20, 4 << 20, 32 << 20, 32 << 20]);
    }
}
