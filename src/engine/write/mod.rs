//! The write engine: the bytes of tensors come from their origins, and one code path hashes,
//! encrypts and writes them.

mod chunk;
mod copy_pool;
mod feed;
mod run;
mod save_task;
mod tensor_data;
#[cfg(test)]
mod tests;
mod write_jobs;
mod write_tensor;

pub use run::{WriteOptions, write_tensors};
pub use tensor_data::{HostCopy, TensorData};
pub use write_tensor::WriteTensor;
