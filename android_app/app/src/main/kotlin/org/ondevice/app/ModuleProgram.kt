package org.ondevice.app

import android.os.Build
import org.ondevice.core.AnswersInfo
import org.ondevice.core.Artifact
import org.ondevice.core.DType
import org.ondevice.core.ErrorKind
import org.ondevice.core.OndeviceException
import org.ondevice.core.Program
import org.ondevice.core.Tensor
import org.pytorch.executorch.EValue
import org.pytorch.executorch.ExecuTorchRuntime
import org.pytorch.executorch.Module
import java.io.File
import java.nio.Buffer
import java.nio.ByteBuffer
import java.nio.ByteOrder

/**
 * The exported program in ExecuTorch. Weights are mapped from the file, not read: those of a whole step by the runtime,
 * those of a block program by [org.ondevice.core.MappedWeights], whose buffers are handed over where they lie.
 *
 * Java's Module cannot unload one method, and an XNNPACK method packs its weights anew when it is loaded: so the
 * module is opened again when the kind of method changes (training, evaluating, generating). The functions of a block
 * program hold no weights, and all stay. Where every layer has a program of its own, a CPU's is closed after each call,
 * so that memory holds the packed weights of one layer; an NPU's stay, as to load one takes as long as to run it.
 *
 * @param file of the artifact: its training program, or the one that answers.
 */
class ModuleProgram(private val artifact: Artifact, private val file: File = artifact.programFile) : Program {
    private val spec = artifact.manifest.spec
    private val soc = artifact.manifest.soc.takeIf { file == artifact.programFile } // what answers is for the CPU
    private var module: Module? = null
    private var kind = ""
    private val ofLayers = HashMap<File, Module>()
    private val staging = Staging()

    override fun execute(method: String, inputs: List<Tensor>, layer: Int): List<Tensor> = refusing("running $method", soc) {
        val values = Array(inputs.size) { EValue.from(staging.toRuntime(it, inputs[it])) }
        if (spec.methods[method]?.program == null) run(open(method), method, values) else runLayer(artifact.programFile(method, layer), method, values)
    }

    private fun open(method: String): Module {
        val wanted = kindOf(method)
        if (wanted != kind) unload()
        return module ?: load(file).also {
            module = it
            kind = wanted
        }
    }

    private fun runLayer(file: File, method: String, values: Array<EValue>): List<Tensor> {
        if (soc != null) return run(ofLayers.getOrPut(file) { load(file) }, method, values)
        val once = load(file)
        try {
            return run(once, method, values)
        } finally {
            once.destroy()
        }
    }

    private fun load(file: File) = Module.load(file.path, Module.LOAD_MODE_MMAP)

    private fun run(open: Module, method: String, values: Array<EValue>) = open.execute(method, *values).map { fromRuntime(it.toTensor()) }

    override fun unload() {
        module?.destroy()
        module = null
        kind = ""
        ofLayers.values.forEach { it.destroy() }
        ofLayers.clear()
    }

    override fun close() = unload()

    private fun kindOf(method: String) =
        if (spec.blocks != null) "blocks" else method.trimEnd { it.isDigit() }.trimEnd('_')

    companion object {
        /**
         * Hold a program's kernels and backends against those of the runtime in this app, by name; ExecuTorch alone
         * would say error 0x14 at the first step.
         */
        fun check(artifact: Artifact) = refusing("starting ExecuTorch", artifact.manifest.soc) {
            ExecuTorchRuntime.getRuntime()
            missing(
                artifact.manifest.spec.methods.values.flatMapTo(sortedSetOf()) { it.ops },
                ExecuTorchRuntime.getRegisteredOps().toSet(),
                artifact.manifest.partition.values.flatten().mapTo(sortedSetOf()) { it.backend },
                ExecuTorchRuntime.getRegisteredBackends().toSet(),
            )?.let { throw it }
        }

        /** The same for the program that answers. */
        fun check(answers: AnswersInfo) = refusing("starting ExecuTorch", null) {
            ExecuTorchRuntime.getRuntime()
            val (ops, backends) = ExecuTorchRuntime.getRegisteredOps().toSet() to ExecuTorchRuntime.getRegisteredBackends().toSet()
            missing(answers.ops.toSet(), ops, setOf(XNNPACK), backends)?.let { throw it }
        }

        internal fun fromRuntime(tensor: org.pytorch.executorch.Tensor): Tensor = when (tensor.dtype()) {
            org.pytorch.executorch.DType.INT64 -> Tensor.of(tensor.dataAsLongArray, *tensor.shape())
            org.pytorch.executorch.DType.FLOAT -> Tensor.of(tensor.dataAsFloatArray, *tensor.shape())
            else -> throw OndeviceException(
                ErrorKind.ARTIFACT, "the program gave a tensor that the app does not take", "int64 or float32",
                "${tensor.dtype()}", "export the artifact again",
            )
        }

        /** The error that names what this runtime lacks, or null when it has everything. */
        fun missing(ops: Set<String>, hasOps: Set<String>, backends: Set<String>, hasBackends: Set<String>): OndeviceException? {
            val names = hasBackends.map { plain(it) }
            val lacksBackends = backends.filter { plain(it).isNotEmpty() && names.none { has -> plain(it) in has || has in plain(it) } }
            val lacksOps = ops.filter { it !in hasOps }
            if (lacksBackends.isEmpty() && lacksOps.isEmpty()) return null
            val hint = if (lacksBackends.any { "qnn" in plain(it) }) "export it with --target android-cpu, which needs no NPU, or build the app with FLAVOUR=qnn"
            else "export it for android-cpu, or build the app with another ExecuTorch"
            return OndeviceException(
                ErrorKind.ARTIFACT, "the ExecuTorch in this app lacks what the program needs",
                (lacksBackends + lacksOps).joinToString(", "),
                "backends ${hasBackends.sorted().joinToString(", ")}; ${hasOps.size} kernels", hint,
            )
        }

        /** A backend's name without what differs between the exporter and the runtime; nothing for the CPU's own kernels. */
        private fun plain(backend: String): String =
            backend.lowercase().filter { it.isLetter() }.removeSuffix("backend").let { if (it in CPU) "" else it }

        private const val XNNPACK = "XnnpackBackend"
        private val CPU = setOf("cpu", "portable", "kernels")

        /** Whatever the runtime throws, as an error with its own words in it. */
        private fun <T> refusing(what: String, soc: String?, body: () -> T): T = try {
            body()
        } catch (error: OndeviceException) {
            throw error
        } catch (error: RuntimeException) {
            throw refused(what, soc, error)
        } catch (error: LinkageError) { // the library is not there for this processor
            throw refused(what, soc, error)
        }

        /** The runtime's own words; of a program for an NPU, that and which chip it was compiled for. */
        internal fun refused(what: String, soc: String?, error: Throwable) = OndeviceException(
            ErrorKind.ARTIFACT, "$what failed: ExecuTorch refused", soc?.let { "the NPU of $it, for which the program was compiled" },
            error.message ?: error.javaClass.simpleName,
            if (soc == null) "check that the artifact was exported for this app's ExecuTorch"
            else "this phone's chip is ${chip()}: export the model with its --soc, or with --target android-cpu, which needs no NPU", error,
        )

        private fun chip(): String = if (Build.VERSION.SDK_INT >= 31) Chip31.name else Build.HARDWARE
    }
}

/** The phone's chip as its maker names it. */
@Since(31)
internal object Chip31 {
    val name: String get() = Build.SOC_MODEL
}

/**
 * Inputs in memory that the runtime can read. Arrays are copied into direct buffers, one for each place in the list of
 * inputs, which the next call uses again: a block program makes some hundred calls a step. Mapped weights are handed over
 * as they are.
 */
internal class Staging {
    private val buffers = ArrayList<ByteBuffer?>()

    /** The tensor for the call at [place]; of an array, until the next call. */
    fun toRuntime(place: Int, tensor: Tensor): org.pytorch.executorch.Tensor {
        tensor.mapped?.let { return frozen(tensor, it.bytes) }
        val memory = memory(place, tensor.count * tensor.dtype.bytes)
        return when (tensor.dtype) {
            DType.INT64 -> org.pytorch.executorch.Tensor.fromBlob(memory.asLongBuffer().also { it.duplicate().put(tensor.longs()) }, tensor.shape)
            else -> org.pytorch.executorch.Tensor.fromBlob(memory.asFloatBuffer().also { it.duplicate().put(tensor.floats()) }, tensor.shape)
        }
    }

    private fun frozen(tensor: Tensor, bytes: ByteBuffer): org.pytorch.executorch.Tensor = when (tensor.dtype) {
        DType.FLOAT32 -> org.pytorch.executorch.Tensor.fromBlob(bytes.asFloatBuffer(), tensor.shape)
        DType.FLOAT16 -> org.pytorch.executorch.Tensor.fromBlob(bytes.asShortBuffer(), tensor.shape)
        DType.INT8 -> org.pytorch.executorch.Tensor.fromBlob(native(bytes), tensor.shape)
        else -> org.pytorch.executorch.Tensor.fromBlobUnsigned(native(bytes), tensor.shape)
    }

    /** The same bytes in the machine's order, which the runtime asks for and a slice does not keep. */
    private fun native(bytes: ByteBuffer): ByteBuffer = bytes.slice().order(ByteOrder.nativeOrder())

    /** Exactly so many bytes: the runtime holds a buffer's capacity against the shape. */
    private fun memory(place: Int, bytes: Int): ByteBuffer {
        while (buffers.size <= place) buffers.add(null)
        val large = buffers[place]?.takeIf { it.capacity() >= bytes } ?: ByteBuffer.allocateDirect(bytes).also { buffers[place] = it }
        val part = large.duplicate()
        (part as Buffer).position(0).limit(bytes) // Buffer's own methods: API 26 has no ByteBuffer.limit that gives a ByteBuffer
        return part.slice().order(ByteOrder.nativeOrder())
    }
}
