// ATTN_LIB_DIR: the folder of libattn.so, where it is not one that the linker searches.
fn main() {
    println!("cargo:rerun-if-env-changed=ATTN_LIB_DIR");
    if let Ok(folder) = std::env::var("ATTN_LIB_DIR") {
        println!("cargo:rustc-link-search=native={folder}");
    }
}
