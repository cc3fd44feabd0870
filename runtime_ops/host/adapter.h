// The trained adapter in PEFT's layout: adapter_config.json and adapter_model.safetensors.
#pragma once

#include "manifest.h"
#include "program.h"

namespace host {

// Writes the adapter whose vector is `flat`, all at once; an adapter that is there is replaced. Failure if a number is not
// finite, or the folder cannot be written.
void save_adapter(const Manifest& manifest, const Floats& flat, const fs::path& folder);

}  // namespace host
