package org.ondevice.core

import java.io.File
import java.io.IOException

/** Reads and checks `manifest.json`; keys that this version does not know are ignored. */
object ManifestReader {
    const val SCHEMA_VERSION = 2L
    const val FILE_NAME = "manifest.json"
    private val COUNT = 1..(1 shl 28)

    /**
     * Read the manifest in [folder].
     *
     * @param checkFiles stream every listed file through SHA-256.
     * @throws OndeviceException [ErrorKind.ARTIFACT]: no artifact, another schema version, a missing, changed or
     *   truncated file, a name that leaves the folder, a program or a layout that the phone cannot run.
     */
    fun read(folder: File, checkFiles: Boolean = true): Manifest {
        val file = File(folder, FILE_NAME)
        if (!file.isFile) {
            throw artifactError(
                "${folder.name} is not an artifact", FILE_NAME, "no such file", "`ondevice export` writes the whole folder; copy all of it",
            )
        }
        val bytes = file.readBytes()
        val text = try {
            Storage.decode(bytes)
        } catch (error: IOException) {
            throw artifactError("$FILE_NAME is not UTF-8", received = error.message, hint = "copy it again")
        }
        val manifest = parse(text, Storage.sha256(bytes))
        if (checkFiles) checkFiles(manifest, folder)
        return manifest
    }

    /** Parse the text of a manifest; [sha256] is that of its bytes. */
    fun parse(text: String, sha256: String = Storage.sha256(text.toByteArray())): Manifest {
        val top = Fields.parse(text, FILE_NAME)
        if (top.raw("schema_version") != SCHEMA_VERSION) {
            throw artifactError(
                "$FILE_NAME is of another version", "schema_version $SCHEMA_VERSION", describe(top.raw("schema_version")),
                "export the model again with the version of ondevice that belongs to this app, or update the app",
            )
        }
        val model = top.fields("model")
        val manifest = Manifest(
            sha256 = sha256,
            ondeviceVersion = top.text("ondevice_version"),
            runtime = top.text("runtime"),
            target = top.text("target"),
            method = method(top.fields("method")),
            modelSource = model.text("source"),
            modelSha256 = model.text("sha256"),
            modelDims = model.map("dims"),
            program = top.textOrNull("program") ?: "program.pte",
            spec = programSpec(top.fields("program_spec")),
            quantize = top.text("quantize"),
            lengthsTokens = top.ints("lengths_tokens", COUNT).sorted().distinct(),
            batchSize = top.int("batch_size", COUNT),
            evalBatchSize = top.int("eval_batch_size", COUNT),
            generator = generator(top.fields("generator")),
            customOps = if (top.has("custom_ops")) top.texts("custom_ops") else emptyList(),
            soc = top.textOrNull("soc"),
            tokenizerSha256 = top.text("tokenizer_sha256"),
            chatTemplateSha256 = top.textOrNull("chat_template_sha256"),
            task = top.textOrNull("task"),
            files = top.map("files").keys.associateWith { top.fields("files").text(it) },
            partition = partition(top),
        )
        ManifestCheck.check(manifest)
        return manifest
    }

    /** Hold every listed file against its SHA-256. */
    fun checkFiles(manifest: Manifest, folder: File) {
        val hint = "copy the whole folder again"
        for ((name, expected) in manifest.files) {
            val file = File(folder, name)
            if (!file.isFile) throw artifactError("the artifact ${folder.name} lacks a file", name, "no such file", hint)
            val received = try {
                Storage.sha256(file)
            } catch (error: IOException) {
                throw artifactError("$name cannot be read", received = error.message, hint = hint)
            }
            if (received != expected) {
                throw artifactError(
                    "$name has changed or is cut off (${file.length()} bytes)", "SHA-256 $expected", "SHA-256 $received", hint,
                )
            }
        }
    }

    private fun method(fields: Fields) =
        MethodInfo(fields.text("name"), fields.double("learning_rate"), fields.keys.associateWith { fields.raw(it) })

    private fun programSpec(fields: Fields): ProgramSpec {
        val shape = fields.text("shape")
        if (shape != "step" && shape != "blocks") {
            throw artifactError(
                "the program is of a shape that this app does not run", "program_spec.shape step or blocks", shape,
                "export it for android-cpu or android-npu",
            )
        }
        val methods = fields.fields("methods")
        return ProgramSpec(
            blocks = if (shape == "step") null else blocksInfo(fields),
            methods = methods.keys.associateWith { programMethod(methods.fields(it)) },
            state = fields.objects("state").map(::stateTensor),
            counters = fields.objects("counters").map { Counter(it.text("name"), it.oneOf("counts", "run_steps", "updates") == "updates") },
            constants = fields.objects("constants").map { Constant(it.text("name"), it.double("train"), it.double("evaluate")) },
            batchCopies = fields.int("batch_copies", COUNT),
            evaluatesWith = fields.oneOf("evaluates_with", "evaluate", "train_step"),
            frozen = fields.textOrNull("frozen"),
            layout = fields.objects("layout").map(::adapterEntry),
            adapterSize = fields.int("adapter_size", COUNT),
            rank = fields.int("rank", 1..1024),
            alpha = fields.double("alpha"),
        )
    }

    private fun blocksInfo(fields: Fields): BlocksInfo {
        val layers = fields.int("layers", COUNT)
        val kinds = if (fields.has("kinds")) fields.ints("kinds", 0..layers) else emptyList()
        if (kinds.isNotEmpty() && kinds.size != layers) throw fields.wrong("kinds", "one for each of $layers layers", kinds)
        val scale = if (fields.has("loss_scale")) fields.double("loss_scale") else null
        if (scale != null && !(scale >= BlockSteps.SMALLEST_LOSS_SCALE)) throw fields.wrong("loss_scale", "at least ${BlockSteps.SMALLEST_LOSS_SCALE}", scale)
        return BlocksInfo(layers, fields.text("weights"), fields.int("vocab", COUNT), kinds, scale)
    }

    private fun stateTensor(fields: Fields): StateTensor {
        val name = fields.text("name")
        if (fields.oneOf("kept", "host", "program") == "program") {
            throw artifactError(
                "the program keeps its $name in a mutable buffer, which the runtime's Java API cannot read",
                "a state tensor that goes in and comes out (kept: host)", "kept: program", "export it with --form functional",
            )
        }
        val role = fields.oneOf("role", "adapter", "optimizer")
        return StateTensor(name, dtype(fields), fields.ints("shape", COUNT), role == "adapter", fields.textOrNull("first"))
    }

    private fun programMethod(fields: Fields): ProgramMethod {
        return ProgramMethod(
            inputs = fields.objects("inputs").map(::port),
            outputs = fields.objects("outputs").map(::port),
            plannedBytes = fields.long("planned_bytes"),
            ops = fields.texts("ops"),
            delegates = fields.int("delegates"),
            instructions = fields.int("instructions"),
            program = fields.textOrNull("program"),
        )
    }

    private fun port(fields: Fields): Port {
        val name = fields.textOrNull("role")
        val role = Role.values().firstOrNull { it.manifestName == name }
            ?: throw fields.wrong("role", Role.values().joinToString(", ") { it.manifestName }, name)
        return Port(fields.text("name"), role, if (role == Role.FROZEN) weightType(fields) else dtype(fields), fields.ints("shape", COUNT), fields.textOrNull("unit") ?: "")
    }

    private fun dtype(fields: Fields): DType {
        val name = fields.text("dtype")
        return listOf(DType.INT64, DType.FLOAT32).firstOrNull { it.manifestName == name }
            ?: throw fields.wrong("dtype", "int64 or float32, which the runtime's Java API hands over", name)
    }

    private fun weightType(fields: Fields): DType {
        val name = fields.text("dtype")
        return DType.values().firstOrNull { it.manifestName == name && it != DType.INT64 }
            ?: throw fields.wrong("dtype", "float32, float16, int8 or uint8 weights", name)
    }

    private fun adapterEntry(fields: Fields) = AdapterEntry(
        linear = fields.text("linear"),
        layer = fields.int("layer"),
        target = fields.text("target"),
        offset = fields.int("offset"),
        rank = fields.int("rank", 1..1024),
        inputs = fields.int("inputs", COUNT),
        outputs = fields.int("outputs", COUNT),
        aOffset = if (fields.has("a_offset")) fields.int("a_offset") else null,
    )

    private fun generator(fields: Fields) = GeneratorInfo(
        fields.textOrNull("scheme") ?: "splitmix64-counter",
        fields.text("distribution"),
        fields.text("lowering"),
        fields.long("seed"),
    )

    private fun partition(top: Fields): Map<String, List<PartitionPart>> {
        if (!top.has("partition")) return emptyMap()
        val part = { fields: Fields ->
            PartitionPart(fields.text("backend"), fields.int("operators"), fields.longOrNull("bytes") ?: 0L)
        }
        val methods = top.fields("partition")
        return methods.keys.associateWith { methods.objects(it).map(part) }
    }
}
