package org.ondevice.core

import java.io.File

/** An adapter as mlx-lm keeps one, for a Mac: the files that `ondevice/artifact/mlx_lm_files.py` writes. */
class MlxLmAdapter(private val artifact: Artifact) {
    private val spec = artifact.manifest.spec

    /**
     * Write `adapters.safetensors` (`lora_a` [inputs, rank] and `lora_b` [rank, outputs], float32) and
     * `adapter_config.json` into [folder], which is there and empty.
     *
     * @throws OndeviceException [ErrorKind.TRAINING] when a value is not finite; [ErrorKind.ARTIFACT] for a layer outside
     *   the model's blocks.
     */
    fun write(flat: FloatArray, folder: File) {
        PeftAdapter.checkFinite(flat)
        val tensors = PeftAdapter(artifact).tensors(flat).entries.associate { (name, tensor) ->
            val (linear, side) = name.removeSuffix(".weight").split(".lora_")
            "$linear.lora_${side.lowercase()}" to transposed(tensor)
        }
        val config = linkedMapOf(
            "fine_tune_type" to "lora",
            "num_layers" to -1, // all of them
            "lora_parameters" to linkedMapOf(
                "rank" to spec.rank, "scale" to spec.alpha / spec.rank, "dropout" to 0.0,
                "keys" to spec.layout.map { module(it.linear) }.distinct().sorted(),
            ),
            "model" to artifact.manifest.modelSource,
        )
        Storage.writing(folder) {
            File(folder, WEIGHTS_NAME).writeBytes(Safetensors(tensors, mapOf("format" to "mlx")).toBytes())
            File(folder, CONFIG_NAME).writeText(Json.write(config, "  ") + "\n")
        }
    }

    private fun module(linear: String): String = LAYER.matchEntire(linear)?.groupValues?.get(1)
        ?: throw artifactError("$linear is in no block", "model.layers.N.<module>", linear, "share the adapter as PEFT files")

    private fun transposed(tensor: StoredTensor): StoredTensor {
        val (rows, columns) = tensor.shape
        val values = tensor.floats!!
        return StoredTensor(listOf(columns, rows), FloatArray(values.size) { values[(it % rows) * columns + it / rows] })
    }

    companion object {
        const val WEIGHTS_NAME = "adapters.safetensors"
        const val CONFIG_NAME = "adapter_config.json"
        private val LAYER = Regex("model\\.layers\\.\\d+\\.(.+)")
    }
}
