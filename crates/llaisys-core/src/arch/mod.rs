//! Model architectures: a table with one row for each (`spec`), the checked hyper-parameters of one model (`config`),
//! its rotary embedding (`rope`) and biases (`bias`), and the ids and names of its weights (`weight_id`),
//! also inside a multimodal checkpoint (`wrapper`). `encoder` has the table and the hyper-parameters of encoders. Reads no files, calls no kernels.

pub mod bias;
pub(crate) mod bounds;
pub mod config;
pub mod encoder;
pub mod rope;
pub mod spec;
pub mod weight_id;
pub mod wrapper;
