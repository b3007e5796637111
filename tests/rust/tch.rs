//! `tch::Tensor`s to and from files.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use tch::{Device, Kind, Tensor};
use tensorizer_torch::tch::{load, load_into, load_named, save};

#[test]
fn tensors_round_trip_through_tch() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    let weight = Tensor::randn([40, 30], (Kind::Float, Device::Cpu));
    let bias = Tensor::arange(5, (Kind::Int64, Device::Cpu)).to_kind(Kind::BFloat16);
    let empty = Tensor::zeros([0, 2], (Kind::Double, Device::Cpu));
    save(&path, &[("weight", &weight.tr()), ("bias", &bias), ("empty", &empty)]).unwrap();

    let loaded = load(&path, Device::Cpu).unwrap();
    let names: Vec<&str> = loaded.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["weight", "bias", "empty"]);
    assert_eq!(loaded[0].1, weight.tr());
    assert_eq!(loaded[1].1, bias);
    assert_eq!(loaded[2].1.size(), [0, 2]);
    assert_eq!(load_named(&path, &["bias"], Device::Cpu).unwrap(), [bias.shallow_clone()]);

    let mut direct = Tensor::zeros([30, 40], (Kind::Float, Device::Cpu));
    let mut strided = Tensor::zeros([5, 2], (Kind::BFloat16, Device::Cpu)).select(1, 1);
    let address = direct.data_ptr();
    load_into(&path, &mut [("weight", &mut direct), ("bias", &mut strided)]).unwrap();
    assert_eq!(direct.data_ptr(), address);
    assert_eq!(direct, weight.tr());
    assert_eq!(strided, bias);
}

#[test]
fn failed_calls_explain_and_leave_tensors_and_files_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    let bias = Tensor::arange(5, (Kind::Int64, Device::Cpu));
    let text = |error: tensorizer::Error| error.to_string();
    assert!(text(load(&path, Device::Cpu).unwrap_err()).contains("No such file"));
    save(&path, &[("bias", &bias)]).unwrap();
    let error = text(save(&path, &[("a", &bias), ("a", &bias)]).unwrap_err());
    assert!(error.contains("the name a comes twice"), "{error}");
    let mut out = Tensor::full([4], 9, (Kind::Int64, Device::Cpu));
    let error = text(load_into(&path, &mut [("bias", &mut out)]).unwrap_err());
    assert!(error.contains("tensor `bias`: the file holds torch.int64 [5]"), "{error}");
    assert_eq!(out, Tensor::full([4], 9, (Kind::Int64, Device::Cpu)));
    let error = text(load_named(&path, &["other"], Device::Cpu).unwrap_err());
    assert!(error.contains("Tensor not found: `other`"), "{error}");
}
