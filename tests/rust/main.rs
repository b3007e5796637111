//! Tests of the core through what it makes public, without torch and Python: one program, since
//! each would link the whole core once more.
#![allow(clippy::too_many_lines)]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod archives;
mod crypt;
mod formats;
mod golden;
mod metadata;
mod plan;
mod roundtrip;
mod short_memory;
mod support;
mod typed;
