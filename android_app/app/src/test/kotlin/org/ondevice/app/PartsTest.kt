package org.ondevice.app

import android.content.ComponentCallbacks2
import android.content.Context
import android.os.PowerManager
import org.junit.Assert.assertEquals
import org.junit.Assert.assertFalse
import org.junit.Assert.assertNull
import org.junit.Assert.assertTrue
import org.junit.Test
import org.ondevice.core.Artifact
import org.ondevice.core.ErrorKind
import org.ondevice.core.MemoryPressure
import org.ondevice.core.OndeviceException
import org.ondevice.core.Rules
import org.ondevice.core.Tensor
import org.robolectric.Robolectric
import org.robolectric.Shadows.shadowOf
import org.robolectric.annotation.Config
import java.io.File

/** The parts below the screens that meet Android. */
class PartsTest : AppTest() {
    @Test
    fun aPlanSurvivesTheProcess() {
        val plan = RunPlan("run-ü", "Modell 1", "daten.jsonl", 77, 0.0125, Rules(pauseAtThermal = 4, batteryFloorPercent = 30, batteryResumePercent = 35, onlyWhileCharging = true), "an adapter", true, 2)
        app.wanted.write(plan)
        assertEquals(plan, WantedRun(File(app.filesDir, "wanted.json")).read())
        File(app.filesDir, "wanted.json").writeText("{\"id\": \"cut off")
        assertNull(app.wanted.read())
        assertFalse("a truncated plan starts nothing", app.runs.goOn())
    }

    @Test
    fun missingKernelsAndBackendsAreNamed() {
        val has = setOf("aten::add.out")
        val backends = setOf("XnnpackBackend", "VulkanBackend")
        assertNull(ModuleProgram.missing(has, has, setOf("XnnpackBackend", "portable"), backends))
        val kernels = ModuleProgram.missing(has + "ondevice::rademacher.out", has, setOf("xnnpack"), backends)!!
        assertEquals("ondevice::rademacher.out", kernels.expected)
        val qnn = ModuleProgram.missing(has, has, setOf("QnnBackend"), backends)!!
        assertEquals("QnnBackend", qnn.expected)
        assertTrue("${qnn.hint}", "FLAVOUR=qnn" in qnn.hint!!)
    }

    /** A phone without an NPU, and one with another chip's, hear which chip the program is for and what needs none. */
    @Test
    fun aProgramForAnotherNpuIsRefusedInWords() {
        val folder = File(fixtures, "blocks npu")
        org.junit.Assume.assumeTrue("no simulator here", folder.isDirectory)
        val artifact = Artifact.open(folder)
        val ops = artifact.manifest.spec.methods.values.flatMap { it.ops }.toSet()
        val backends = artifact.manifest.partition.values.flatten().map { it.backend }.toSet()
        val lacking = ModuleProgram.missing(ops, ops, backends, setOf("XnnpackBackend", "VulkanBackend"))!!
        assertEquals("QnnBackend", lacking.expected)
        assertTrue("${lacking.hint}", "--target android-cpu" in lacking.hint!!)
        assertNull(ModuleProgram.missing(ops, ops, backends, setOf("XnnpackBackend", "QnnBackend")))
        org.robolectric.util.ReflectionHelpers.setStaticField(android.os.Build::class.java, "SOC_MODEL", "SM7675")
        val refused = ModuleProgram.refused("running block_forward_2x32", artifact.manifest.soc, RuntimeException("error 0x20"))
        assertTrue(refused.message, "SM8650" in refused.expected!! && refused.received == "error 0x20")
        assertTrue("${refused.hint}", "SM7675" in refused.hint!! && "--target android-cpu" in refused.hint!!)
    }

    /** Tensors go into ExecuTorch's own classes and come out the same. */
    @Test
    fun tensorsKeepTheirValues() {
        val ids = Tensor.of(longArrayOf(0, -100, Long.MAX_VALUE, 7, 8, 9), 2, 3)
        val rates = Tensor.of(floatArrayOf(0.1f, -0f, Float.MIN_VALUE), 3)
        val staging = Staging()
        val (before, after) = staging.toRuntime(0, ids) to staging.toRuntime(1, rates)
        val whole = ModuleProgram.fromRuntime(before)
        val real = ModuleProgram.fromRuntime(after)
        val fewer = Tensor.of(floatArrayOf(2f, 3f), 1, 2) // in memory that was larger
        assertEquals(fewer.floats().toList(), ModuleProgram.fromRuntime(staging.toRuntime(0, fewer)).floats().toList())
        assertEquals(ids.longs().toList() to listOf(2L, 3L), whole.longs().toList() to whole.shape.toList())
        assertEquals(rates.floats().toList() to listOf(3L), real.floats().toList() to real.shape.toList())
        val bytes = org.pytorch.executorch.Tensor.fromBlob(byteArrayOf(1, 2), longArrayOf(2))
        val error = org.junit.Assert.assertThrows(OndeviceException::class.java) { ModuleProgram.fromRuntime(bytes) }
        assertEquals("int64 or float32" to "INT8", error.expected to error.received)
    }

    /** Frozen weights reach ExecuTorch's classes out of the mapped file, those of a tile from its first row on. */
    @Test
    fun weightsAreHandedOverWhereTheyAreMapped() {
        val folder = File(fixtures, "blocks")
        val spec = Artifact.open(folder).manifest.spec
        val file = File(folder, spec.blocks!!.weights)
        val stored = org.ondevice.core.Safetensors.read(file).tensors
        val weights = org.ondevice.core.MappedWeights(file)
        val staging = Staging()
        val tile = spec.methods.getValue("head_sums").inputs.last()
        val whole = stored.getValue(tile.name)
        val start = whole.shape[0] - tile.shape[0]
        assertTrue("the tile is not the whole", start > 0)
        val tensor = weights.tensor(tile, tile.name, start)
        assertTrue(tensor.mapped!!.bytes is java.nio.MappedByteBuffer && tensor.mapped!!.bytes.isDirect)
        val width = tile.shape[1]
        assertEquals(whole.floats!!.drop(start * width), ModuleProgram.fromRuntime(staging.toRuntime(0, tensor)).floats().toList())
        for (port in spec.methods.getValue("block_forward_2x64").inputs.filter { it.role == org.ondevice.core.Role.FROZEN }) {
            val name = port.name.replace("{layer}", "1")
            val values = ModuleProgram.fromRuntime(staging.toRuntime(0, weights.tensor(port, name))).floats().toList()
            assertEquals(name, stored.getValue(name).floats!!.toList(), values)
        }
    }

    /** Weights of fewer bits have ExecuTorch's own dtypes, and the file's bytes. */
    @Test
    fun packedWeightsKeepTheirBytes() {
        val folder = File(fixtures, "blocks q4")
        val spec = Artifact.open(folder).manifest.spec
        val weights = org.ondevice.core.MappedWeights(File(folder, spec.blocks!!.weights))
        val found = HashSet<String>()
        for (port in spec.methods.values.flatMap { it.inputs }.filter { it.role == org.ondevice.core.Role.FROZEN }.distinctBy { it.name }) {
            val tensor = weights.tensor(port, port.name.replace("{layer}", "1"))
            val given = Staging().toRuntime(0, tensor)
            val bytes = tensor.mapped!!.bytes.duplicate().order(java.nio.ByteOrder.nativeOrder())
            found += given.dtype().name
            when (given.dtype()) {
                org.pytorch.executorch.DType.HALF -> given.dataAsShortArray.forEach { assertEquals(bytes.short, it) }
                org.pytorch.executorch.DType.UINT8 -> given.dataAsUnsignedByteArray.forEach { assertEquals(bytes.get(), it) }
                org.pytorch.executorch.DType.INT8 -> given.dataAsByteArray.forEach { assertEquals(bytes.get(), it) }
                else -> given.dataAsFloatArray.forEach { assertEquals(bytes.float.toRawBits(), it.toRawBits()) }
            }
            assertFalse(port.name, bytes.hasRemaining())
        }
        assertEquals(setOf("HALF", "UINT8", "INT8", "FLOAT"), found)
    }

    @Test
    fun withoutTheLibraryTheErrorSaysSo() {
        val error = org.junit.Assert.assertThrows(OndeviceException::class.java) { ModuleProgram.check(Artifact.open(artifact)) }
        assertEquals(ErrorKind.ARTIFACT, error.kind)
        assertTrue(error.message, "starting ExecuTorch failed" in error.what)
    }

    @Test
    fun thePhoneSaysHowItIs() {
        battery(42, charging = true, celsius = 38.2)
        shadowOf(app.getSystemService(Context.POWER_SERVICE) as PowerManager).setCurrentThermalStatus(2)
        val now = app.health.now()
        assertEquals(listOf(42, true, 2, 38.2f, MemoryPressure.NONE), listOf(now.batteryPercent, now.charging, now.thermalStatus, now.batteryCelsius, now.memoryPressure))
        assertTrue(now.freeDiskBytes!! > 0)
        @Suppress("DEPRECATION")
        app.onTrimMemory(ComponentCallbacks2.TRIM_MEMORY_RUNNING_LOW)
        assertEquals(MemoryPressure.LOW, app.health.now().memoryPressure)
        org.robolectric.shadows.ShadowSystemClock.advanceBy(java.time.Duration.ofMillis(PhoneHealth.TRIM_HOLDS_MS + 1))
        assertEquals(MemoryPressure.NONE, app.health.now().memoryPressure)
    }

    @Test
    fun processMemoryIsTheKernels() {
        val status = File(app.cacheDir, "status").apply { writeText("Name:\tx\nVmHWM:\t  2048 kB\nVmRSS:\t 1024 kB\n") }
        assertEquals(2L shl 20 to (1L shl 20), ProcessMeter(status).let { it.peakMemoryBytes() to it.memoryBytes() })
        assertTrue(ProcessMeter().memoryBytes() > 1 shl 20)
    }

    @Test
    fun aChargerStartsAWantedRunWhoseProcessIsGone() {
        val job = Robolectric.buildService(ChargingJob::class.java).create().get()
        job.onStartJob(null)
        assertNull(shadowOf(app).peekNextStartedService())
        app.wanted.write(RunPlan("run-x", "m", "d.jsonl", 1, 0.1, Rules(onlyWhileCharging = true)))
        job.onStartJob(null)
        assertEquals(TrainService::class.java.name, shadowOf(app).nextStartedService.component!!.className)
    }

    /** What core says to a person, in the phone's language; each cause of a pause has its words. */
    @Test
    fun pausesAreSaidInThePhonesLanguage() {
        val bad = org.ondevice.core.Health(thermalStatus = 4, batteryPercent = 7, memoryPressure = MemoryPressure.LOW, freeDiskBytes = 1L shl 20)
        val reasons = org.ondevice.core.PauseRules.reasons(bad, Rules(onlyWhileCharging = true)) + org.ondevice.core.PauseReason(org.ondevice.core.PauseCause.USER, "you paused it")
        assertEquals(org.ondevice.core.PauseCause.values().toSet(), reasons.map { it.cause }.toSet())
        val english = reasons.associate { it.cause to Words.reason(app, it) }
        for (reason in reasons) if (reason.cause != org.ondevice.core.PauseCause.DISK) assertEquals(reason.words, english.getValue(reason.cause))
        org.robolectric.RuntimeEnvironment.setQualifiers("+de")
        val german = reasons.associate { it.cause to Words.reason(app, it) }
        for (cause in german.keys) assertFalse("$cause", german[cause] == english[cause])
        assertEquals("das Telefon ist heiß (Wärmestufe: kritisch); geht unter „mäßig“ weiter", german[org.ondevice.core.PauseCause.HEAT])
        assertEquals("der Akkustand ist 7 %; geht ab 25 % oder am Ladegerät weiter", german[org.ondevice.core.PauseCause.BATTERY])
        open(2)
        untilSaid("Noch nichts zum Trainieren")
        shot("train-german")
    }

    @Test
    fun aRebootStartsAWantedRunUnlessTheUserPausedIt() {
        val plan = RunPlan("run-x", "m", "d.jsonl", 1, 0.1, Rules(onlyWhileCharging = true))
        val boot = BootReceiver()
        boot.onReceive(app, android.content.Intent(android.content.Intent.ACTION_BOOT_COMPLETED))
        assertNull(shadowOf(app).peekNextStartedService())
        app.wanted.write(plan.copy(paused = true))
        boot.onReceive(app, android.content.Intent(android.content.Intent.ACTION_BOOT_COMPLETED))
        assertNull(shadowOf(app).peekNextStartedService())
        app.wanted.write(plan)
        boot.onReceive(app, android.content.Intent("something.else"))
        assertNull(shadowOf(app).peekNextStartedService())
        boot.onReceive(app, android.content.Intent(android.content.Intent.ACTION_BOOT_COMPLETED))
        assertEquals(TrainService::class.java.name, shadowOf(app).nextStartedService.component!!.className)
        val known = app.packageManager.queryBroadcastReceivers(android.content.Intent(android.content.Intent.ACTION_BOOT_COMPLETED).setPackage(app.packageName), 0)
        assertEquals(listOf(BootReceiver::class.java.name), known.map { it.activityInfo.name })
    }

    @Test
    fun theNotificationPausesAndStops() {
        importModel()
        importData()
        begin(4000)
        until("some steps") { (app.runs.live?.stepsDone ?: 0) >= 2 }
        val notification = Notifications(app).training(app.runs.live)
        assertEquals(listOf("Pause", "Stop"), notification.actions.map { it.title.toString() })
        assertEquals(TrainService.STOP, shadowOf(notification.actions[1].actionIntent).savedIntent.action)
        assertTrue("${shadowOf(notification).contentText}", "of 4,000" in shadowOf(notification).contentText)
    }

    /** The oldest Android: no thermal status, and everything else goes on. */
    @Test
    @Config(sdk = [26])
    fun runsOnAndroid8() {
        assertNull(app.health.now().thermalStatus)
        importModel()
        importData()
        open(2)
        begin(3)
        until("the end") { app.runs.live!!.isOver }
        untilSaid("Done: 3 steps.")
    }
}
