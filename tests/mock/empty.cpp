// A library that is no driver.
extern "C" __attribute__((visibility("default"))) int attn_mock_nothing() {
  return 0;
}
