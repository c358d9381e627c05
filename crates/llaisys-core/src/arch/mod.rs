//! Model architectures: a table with one row for each (`spec`), the checked hyper-parameters of one model (`config`),
//! its rotary embedding (`rope`), biases (`bias`), experts (`experts`), recurrent layers (`recurrent`: `delta_net`,
//! `short_conv`) and layers of two kinds (`gemma4`), the ids and names of its weights (`weight_id`), also inside a multimodal checkpoint (`wrapper`), and where their rows are
//! stored (`row_map`). `encoder` has the table and the hyper-parameters of encoders. Reads no files, calls no kernels.

pub mod bias;
pub(crate) mod bounds;
pub mod config;
pub mod delta_net;
pub mod encoder;
pub mod experts;
pub mod gemma4;
pub mod recurrent;
pub mod rope;
pub mod row_map;
pub mod short_conv;
pub mod spec;
pub mod weight_id;
pub mod wrapper;
