package org.ondevice.core

import java.io.File

/** The flat adapter vector of an artifact as a PEFT adapter and back: the files that Python's `adapter()` writes. */
class PeftAdapter(private val artifact: Artifact) {
    private val spec = artifact.manifest.spec

    /** `<linear>.lora_A.weight` [rank, inputs] and `<linear>.lora_B.weight` [outputs, rank] by name. */
    fun tensors(flat: FloatArray): Map<String, StoredTensor> {
        require(flat.size == spec.adapterSize) { "${flat.size} elements are no adapter of ${spec.adapterSize}" }
        val found = LinkedHashMap<String, StoredTensor>()
        for (entry in spec.layout) {
            val a = entry.aOffset?.let { flat.copyOfRange(it, it + entry.rank * entry.inputs) } ?: frozenA(entry)
            found[entry.aName] = StoredTensor(listOf(entry.rank, entry.inputs), a)
            val b = FloatArray(entry.count) { place -> flat[entry.offset + (place % entry.rank) * entry.outputs + place / entry.rank] }
            found[entry.bName] = StoredTensor(listOf(entry.outputs, entry.rank), b)
        }
        return found
    }

    /**
     * Write `adapter_model.safetensors` and `adapter_config.json` into [folder], which is there and empty.
     *
     * @throws OndeviceException [ErrorKind.TRAINING] when a value is not finite.
     */
    fun write(flat: FloatArray, folder: File) {
        checkFinite(flat)
        val tensors = tensors(flat)
        val metadata = linkedMapOf("format" to "pt", DIGEST_KEY to digest(tensors))
        val file = Safetensors(tensors.mapKeys { PREFIX + it.key }, metadata)
        Storage.writing(folder) {
            File(folder, WEIGHTS_NAME).writeBytes(file.toBytes())
            File(folder, CONFIG_NAME).writeText(Json.write(config().toSortedMap(), "  ") + "\n")
        }
    }

    /**
     * The flat vector of the adapter in [folder], which must be of this artifact's layout and scale.
     *
     * @throws OndeviceException [ErrorKind.ARTIFACT]: damaged, changed, of another kind, shape or scale, or with another frozen A.
     */
    fun read(folder: File): FloatArray {
        checkConfig(folder)
        val stored = Safetensors.read(File(folder, WEIGHTS_NAME))
        val tensors = stored.tensors.mapKeys { it.key.removePrefix(PREFIX) }
        val recorded = stored.metadata[DIGEST_KEY]
        if (recorded != null && recorded != digest(tensors)) {
            throw artifactError("$WEIGHTS_NAME has changed since it was written", "SHA-256 of the tensors $recorded", digest(tensors), "copy it again")
        }
        val flat = FloatArray(spec.adapterSize)
        for (entry in spec.layout) {
            val (a, b) = tensors[entry.aName] to tensors[entry.bName]
            if (a?.floats == null || b?.floats == null || b.shape != listOf(entry.outputs, entry.rank) || a.shape != listOf(entry.rank, entry.inputs)) {
                throw artifactError(
                    "the adapter does not fit the model: ${entry.linear}",
                    "lora_A [${entry.rank}, ${entry.inputs}] and lora_B [${entry.outputs}, ${entry.rank}]",
                    "lora_A ${a?.shape ?: "missing"}, lora_B ${b?.shape ?: "missing"}", OTHER,
                )
            }
            if (entry.aOffset == null) checkA(a.floats, frozenA(entry), entry.linear) else a.floats.copyInto(flat, entry.aOffset)
            for (place in 0 until entry.count) flat[entry.offset + (place % entry.rank) * entry.outputs + place / entry.rank] = b.floats[place]
        }
        val beyond = tensors.size - 2 * spec.layout.size
        if (beyond > 0) {
            val pairs = "${spec.layout.size} pairs"
            throw artifactError("the adapter changes layers that this artifact does not", pairs, "$beyond tensors more", OTHER)
        }
        if (flat.any { !it.isFinite() }) throw artifactError("the adapter has values that are no numbers", "finite values", "inf or nan", OTHER)
        return flat
    }

    private fun frozenA(entry: AdapterEntry): FloatArray {
        val found = artifact.frozen[entry.aName]
        if (found?.floats == null || found.shape != listOf(entry.rank, entry.inputs)) {
            throw artifactError(
                "${spec.frozen} does not fit the manifest", "${entry.aName} float32 [${entry.rank}, ${entry.inputs}]",
                found?.tensor() ?: "no such tensor", "export the model again",
            )
        }
        return found.floats
    }

    /** Another machine's logarithm and sine draw A within a millionth of this; another seed draws something else. */
    private fun checkA(found: FloatArray, expected: FloatArray, linear: String) {
        for (index in found.indices) {
            if (!(Math.abs(found[index] - expected[index]) <= A_ERROR)) { // not a number is refused, too
                throw artifactError(
                    "the adapter's frozen A differs from this artifact's: $linear", "the A that seed ${artifact.manifest.generator.seed} draws",
                    "element $index is ${found[index]}, not ${expected[index]}", OTHER,
                )
            }
        }
    }

    private fun checkConfig(folder: File) {
        val file = File(folder, CONFIG_NAME)
        if (!file.isFile) throw artifactError("${folder.name} is not a PEFT adapter", CONFIG_NAME, "no such file", "choose a folder or zip that holds it")
        val config = Fields.parse(Storage.readText(file), CONFIG_NAME)
        if (config.raw("peft_type") != "LORA") throw config.wrong("peft_type", "LORA", config.raw("peft_type"))
        for (field in listOf("use_dora", "use_rslora", "fan_in_fan_out", "lora_bias")) {
            if (config.raw(field) == true) throw artifactError("$CONFIG_NAME: field '$field'", "false", "true", "only plain LoRA can be used")
        }
        if (config.int("r", 1..1024) != spec.rank || config.double("lora_alpha") != spec.alpha) {
            throw artifactError(
                "the adapter has another rank or scale", "r ${spec.rank}, lora_alpha ${spec.alpha}",
                "r ${config.raw("r")}, lora_alpha ${config.raw("lora_alpha")}", OTHER,
            )
        }
    }

    private fun config(): Map<String, Any?> {
        val alpha = spec.alpha
        val layers = spec.layout.map { it.layer }.distinct().sorted()
        val targets = spec.layout.map { it.linear.substringAfterLast('.') }.distinct().sorted()
        val whole = spec.layout.size == layers.size * targets.size
        return mapOf(
            "auto_mapping" to null, "base_model_name_or_path" to artifact.manifest.modelSource.ifEmpty { null }, "bias" to "none",
            "fan_in_fan_out" to false, "inference_mode" to true, "init_lora_weights" to true, "layers_pattern" to null,
            "layers_to_transform" to if (whole && layers != layers.indices.toList()) layers else null,
            "lora_alpha" to if (alpha == Math.rint(alpha)) alpha.toLong() else alpha, "lora_dropout" to 0.0, "modules_to_save" to null,
            "peft_type" to "LORA", "r" to spec.rank, "revision" to null,
            "target_modules" to if (whole) targets else spec.layout.map { it.linear }.sorted(),
            "task_type" to "CAUSAL_LM", "use_dora" to false, "use_rslora" to false,
        )
    }

    companion object {
        const val WEIGHTS_NAME = "adapter_model.safetensors"
        const val CONFIG_NAME = "adapter_config.json"
        private const val PREFIX = "base_model.model."
        private const val DIGEST_KEY = "ondevice.tensors_sha256"
        private const val A_ERROR = 1e-6f
        private const val OTHER = "use an adapter that this artifact made"

        internal fun checkFinite(flat: FloatArray) {
            if (flat.all { it.isFinite() }) return
            throw OndeviceException(
                ErrorKind.TRAINING, "the adapter has values that are no numbers", "finite values", "inf or nan", "train with a lower learning rate",
            )
        }

        /** SHA-256 over names, shapes and float32 values, as `ondevice/artifact/adapter.py` takes it. */
        internal fun digest(tensors: Map<String, StoredTensor>): String {
            val digest = java.security.MessageDigest.getInstance("SHA-256")
            for ((name, tensor) in tensors.toSortedMap()) {
                val values = tensor.floats ?: FloatArray(0)
                digest.update("$name (${tensor.shape.joinToString(", ")}${if (tensor.shape.size == 1) "," else ""})\n".toByteArray(Charsets.UTF_8))
                val buffer = java.nio.ByteBuffer.allocate(values.size * 4).order(java.nio.ByteOrder.LITTLE_ENDIAN)
                for (value in values) buffer.putFloat(value)
                digest.update(buffer.array())
            }
            return Storage.hex(digest.digest())
        }
    }
}
