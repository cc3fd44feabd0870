package org.ondevice.app

import android.app.Application
import android.os.CancellationSignal
import android.system.Os
import org.ondevice.core.Artifact
import org.ondevice.core.Program
import org.ondevice.core.TrialResult
import java.io.File
import java.util.concurrent.Semaphore

/** A comparison as it was asked: [left] is the other adapter's name, null for the base model. */
class ShownTrial(val prompt: String, val left: String?, val right: String, val result: TrialResult)

/** What lives as long as the process: what is stored, what is running, and what the phone says of itself. */
class OndeviceApp : Application() {
    val jobs by lazy { Jobs() }
    val store by lazy { Store(filesDir) }
    val health by lazy { PhoneHealth(this) }
    val wanted by lazy { WantedRun(File(filesDir, "wanted.json")) }
    val runs by lazy { Runs(this) }
    val rounds by lazy { FleetRounds(this) }

    /** Who holds a program that trains: a run or a fleet's round, never both. */
    val turn = Semaphore(1)

    /** What the try screen showed last, or what is written of it so far; a rotation keeps it. */
    var lastTrial: ShownTrial? = null

    /** Opens an artifact's program: ExecuTorch on the phone; the JVM tests put Python's ExecuTorch here. */
    var openProgram: (Artifact) -> Program = { artifact ->
        // Where a Qualcomm phone's DSP finds its side of the QNN flavour; nothing else reads it.
        Os.setenv("ADSP_LIBRARY_PATH", applicationInfo.nativeLibraryDir, true)
        ModuleProgram.check(artifact)
        ModuleProgram(artifact)
    }

    /** Opens the program that answers with packed weights, of an artifact that has one. */
    var openAnswers: (Artifact) -> Program = { artifact ->
        ModuleProgram.check(artifact.answers!!)
        ModuleProgram(artifact, artifact.answersFile)
    }

    /** How long another app may take for an answer. */
    var foreignLimitMs = Foreign.LIMIT_MS

    /**
     * Run [work] on what another app lends, as [Jobs.run]; the user may cancel it.
     *
     * What was [sent] without the user's asking is read aside of all other work.
     */
    fun <T> import(place: String, words: String, sent: Boolean, work: (Imports) -> T, done: (T) -> Unit = {}) {
        val signal = CancellationSignal()
        val threads = if (sent) Foreign.SENT else Foreign.PICKED
        jobs.run(place, words, signal, sent, { Foreign(signal, foreignLimitMs, threads).use { work(Imports(this, it)) } }, done)
    }

    @Suppress("OVERRIDE_DEPRECATION")
    override fun onTrimMemory(level: Int) {
        super.onTrimMemory(level)
        health.onTrimMemory(level)
        runs.healthChanged()
    }
}
