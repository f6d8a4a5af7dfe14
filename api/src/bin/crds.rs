//! Writes the custom resource definitions into a directory: `crds --output DIR`.

use std::{fs, path::PathBuf, process::ExitCode};

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let directory = match (arguments.next(), arguments.next(), arguments.next()) {
        (Some(flag), Some(directory), None) if flag == "--output" => PathBuf::from(directory),
        _ => {
            eprintln!("usage: crds --output DIR");
            return ExitCode::from(2);
        }
    };
    match write(&directory) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("crds: {error}");
            ExitCode::FAILURE
        }
    }
}

fn write(directory: &PathBuf) -> Result<(), Box<dyn std::error::Error>> {
    fs::create_dir_all(directory)?;
    for crd in api::crds::all()? {
        let path = directory.join(api::crds::file_name(&crd));
        fs::write(&path, api::crds::yaml(&crd)?)?;
        println!("{}", path.display());
    }
    Ok(())
}
