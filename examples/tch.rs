//! Saves the variables of a tch model and loads them into another one of the same shape.
//!
//!     LIBTORCH_USE_PYTORCH=1 LD_LIBRARY_PATH="$(python benchmarks/torch_lib.py)" \
//!       cargo run --package tensorizer-torch --features tch --example tch

use tch::nn::{self, Module as _};
use tch::{Device, Kind, Tensor};

fn model(store: &nn::VarStore) -> nn::Sequential {
    let root = store.root();
    nn::seq()
        .add(nn::linear(&root / "first", 16, 64, nn::LinearConfig::default()))
        .add_fn(|x| x.relu())
        .add(nn::linear(&root / "second", 64, 4, nn::LinearConfig::default()))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::temp_dir().join(format!("example-{}.tensors", std::process::id()));
    let (trained, fresh) = (nn::VarStore::new(Device::Cpu), nn::VarStore::new(Device::Cpu));
    let (first, second) = (model(&trained), model(&fresh));

    let variables = trained.variables();
    let tensors: Vec<(&String, &Tensor)> = variables.iter().collect();
    tensorizer_torch::tch::save(&path, &tensors)?;

    let mut variables = fresh.variables();
    let mut out: Vec<(&String, &mut Tensor)> = variables.iter_mut().collect();
    tensorizer_torch::tch::load_into(&path, &mut out)?;
    std::fs::remove_file(&path)?;

    let x = Tensor::randn([2, 16], (Kind::Float, Device::Cpu));
    assert_eq!(first.forward(&x), second.forward(&x));
    println!("{} tensors saved and loaded, the models agree", out.len());
    Ok(())
}
