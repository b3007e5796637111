//! Rust programs without torch: open, list, read, view, write.

use half::{bf16, f16};
use tensorizer::format::dtype::DType;
use tensorizer::{Element, Error, SaveTensor, TensorFile};

fn round_trip<T: Element + PartialEq + std::fmt::Debug>(values: &[T]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    let shape = [values.len() as u64 / 2, 2];
    tensorizer::write(&path, vec![SaveTensor::new("t", &shape, values).unwrap()]).unwrap();
    let file = TensorFile::open(&path).unwrap();
    assert_eq!(file.entries()[0].dtype.name(), T::NAME);
    let tensor = file.read("t").unwrap();
    assert_eq!((tensor.shape(), tensor.dtype().name()), (&shape[..], T::NAME));
    assert_eq!(tensor.name().stored(), "t");
    assert_eq!(tensor.as_slice::<T>().unwrap(), values);
    let mut mine = vec![T::zeroed(); values.len()];
    file.read_into("t", &mut mine).unwrap();
    assert_eq!(mine, values);
}

#[test]
fn every_element_type_round_trips() {
    round_trip(&[1u8, 2, 3, 255]);
    round_trip(&[1u16, u16::MAX]);
    round_trip(&[1u32, u32::MAX]);
    round_trip(&[1u64, u64::MAX]);
    round_trip(&[i8::MIN, 1]);
    round_trip(&[i16::MIN, 1]);
    round_trip(&[i32::MIN, 1]);
    round_trip(&[i64::MIN, 1]);
    round_trip(&[f16::from_f32(0.1), f16::MAX]);
    round_trip(&[bf16::from_f32(0.1), bf16::MIN]);
    round_trip(&[0.1f32, -0.0]);
    round_trip(&[0.1f64, f64::INFINITY]);
    round_trip::<f32>(&[]);
    round_trip(&vec![7u32; 3 << 20]); // mapped
}

#[test]
fn several_tensors_are_returned_in_the_requested_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    let (a, b) = ([1.0f32, 2.0], [f16::ONE]);
    let quantised = DType::from_name("float8_e4m3fn").unwrap();
    let tensors = vec![
        SaveTensor::new("a", &[2], &a).unwrap(),
        SaveTensor::new("b", &[], &b).unwrap(),
        SaveTensor::from_bytes("c", quantised, &[3], b"abc").unwrap(),
    ];
    tensorizer::write(&path, tensors).unwrap();
    let file = TensorFile::open(&path).unwrap();
    let read = file.read_all(&["c", "a"]).unwrap();
    assert_eq!(read[0].bytes(), b"abc");
    assert_eq!(read[1].as_slice::<f32>().unwrap(), a);
    assert!(file.read("b").unwrap().shape().is_empty());
    assert!(file.read_all::<&str>(&[]).unwrap().is_empty());
}

#[test]
fn invalid_calls_fail_and_leave_destinations_untouched() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    tensorizer::write(&path, vec![SaveTensor::new("a", &[2], &[1.0f32, 2.0]).unwrap()]).unwrap();
    let file = TensorFile::open(&path).unwrap();
    let text = |error: Error| error.to_string();

    let tensor = file.read("a").unwrap();
    assert_eq!(
        text(tensor.as_slice::<i32>().unwrap_err()),
        "tensor `a`: expected elements of type int32, found torch.float32"
    );
    let mut wrong_type = [9i32; 2];
    assert!(file.read_into("a", &mut wrong_type).is_err());
    assert_eq!(wrong_type, [9; 2]);
    let mut too_short = [9.0f32];
    let error = text(file.read_into("a", &mut too_short).unwrap_err());
    assert!(error.contains("needs 8 bytes, its destination has 4"), "{error}");
    assert_eq!(too_short, [9.0]);
    assert!(matches!(file.read("b"), Err(Error::TensorNotFound { .. })));
    assert!(matches!(TensorFile::open(&folder.path().join("none")), Err(Error::Io { .. })));
    assert!(SaveTensor::new("a", &[3], &[1.0f32, 2.0]).is_err());
    assert!(SaveTensor::new("a", &[u64::MAX, 2], &[1.0f32]).is_err());
    let twice = || SaveTensor::new("a", &[1], &[1u8]).unwrap();
    assert!(tensorizer::write(&path, vec![twice(), twice()]).is_err());
    assert_eq!(TensorFile::open(&path).unwrap().read("a").unwrap().bytes().len(), 8);
}
